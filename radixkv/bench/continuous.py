"""Calling transformers' continuous batching, whose interface differs from version to version."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PAGE = {"page_size": 256, "block_size": 32}
_LOGGER = "ContinuousBatchingLogger"


class ContinuousBatchingFailed(Exception):
    """`generate_batch` is not there, or ended without the answers."""


def continuous_batch(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    end_ids: Sequence[int] = (),
    max_batched_tokens: int | None = None,
) -> tuple[list[list[int]], int]:
    """Run `model.generate_batch`, greedy.

    Its cache is given room for all prompts at once, in pages of its default size. Left to itself it takes most of
    the memory that is free and clears all of it: here that took a hundred times as long as the work.

    Args:
        model: The model; configuration and attention implementation are as before afterwards.
        prompts: Token ids.
        max_new_tokens: Limit of each answer.
        end_ids: Tokens that end an answer.
        max_batched_tokens: Most tokens of one forward; None leaves the choice to transformers.

    Returns:
        The new tokens of each prompt, and how many slots its cache has.

    Raises:
        ContinuousBatchingFailed: This version lacks it, or a request has no answer; the message says why.
        Exception: What transformers raises.
    """
    from transformers import GenerationConfig

    generate_batch = getattr(model, "generate_batch", None)
    if generate_batch is None:
        raise ContinuousBatchingFailed("this version of transformers has no generate_batch")
    config: GenerationConfig = copy.deepcopy(model.generation_config)  # it writes into the one it is given
    config.do_sample, config.num_beams, config.max_new_tokens = False, 1, max_new_tokens
    config.eos_token_id = list(end_ids) or None
    accepted = inspect.signature(generate_batch).parameters
    options, slots = _sizes(config, prompts, max_new_tokens, max_batched_tokens)
    options |= {"progress_bar": False, "warmup": model.device.type == "cuda"}
    options = {name: value for name, value in options.items() if name in accepted}
    implementation = model.config._attn_implementation
    try:
        with _collecting_errors() as errors:
            outputs = generate_batch(
                [list(prompt) for prompt in prompts],
                generation_config=config,
                max_new_tokens=max_new_tokens,
                **options,
            )
    finally:
        if model.config._attn_implementation != implementation:  # some versions leave their own behind
            model.set_attn_implementation(implementation)
    results = [outputs[rid] for rid in sorted(outputs, key=_number)]  # older versions: as they finished
    failed = [str(result.error) for result in results if result.error]
    if failed or len(results) < len(prompts):
        reasons = errors or failed or [f"{len(results)} of {len(prompts)} requests were answered"]
        raise ContinuousBatchingFailed(reasons[0])
    return [list(map(int, result.generated_tokens)) for result in results], slots


def _number(rid: str) -> int:
    """`"req_12"` -> 12."""
    digits = rid.rpartition("_")[2]
    return int(digits) if digits.isdigit() else 0


def _sizes(
    config: Any, prompts: Sequence[list[int]], max_new_tokens: int, max_batched_tokens: int | None
) -> tuple[dict[str, Any], int]:
    """Options that set the size of the cache, and that size in slots. Older versions read it off `config`."""
    import transformers

    made = getattr(transformers, "ContinuousBatchingConfig", None)
    accepted = inspect.signature(made).parameters if made is not None else {"block_size": None}
    name = next(name for name in _PAGE if name in accepted)
    page = _PAGE[name]
    num_blocks = sum(-(-(len(prompt) + max_new_tokens) // page) for prompt in prompts)
    wanted = {name: page, "num_blocks": num_blocks}
    if max_batched_tokens is not None:
        wanted["max_batch_tokens"] = max_batched_tokens
    if made is not None:
        return {"continuous_batching_config": made(**wanted)}, num_blocks * page
    for key, value in wanted.items():
        setattr(config, key, value)
    return {}, num_blocks * page


class _Collector(logging.Filter):
    """Keeps what is logged and lets none of it through. `generate_batch` exchanges the handlers; a filter stays."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        """Note the first line; the cause stands there."""
        if record.levelno >= logging.ERROR:
            self.errors.append(record.getMessage().strip().split("\n")[0])
        return False


@contextlib.contextmanager
def _collecting_errors() -> Iterator[list[str]]:
    """It logs what went wrong in its thread, and prints to stdout: keep the former, drop the latter."""
    logger, collector = logging.getLogger(_LOGGER), _Collector()
    logger.addFilter(collector)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield collector.errors
    finally:
        logger.removeFilter(collector)
