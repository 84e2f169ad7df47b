"""`radixkv demo` from its options to its result: load, measure, plot."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from radixkv.core.errors import first_line, install_hint
from radixkv.demo.bars import WorkloadBars
from radixkv.demo.errors import DemoError
from radixkv.demo.runner import DemoResult, Runner
from radixkv.demo.workloads import ChatFormat, Message, make_workloads, plain_chat
from radixkv.replay.hub import hub_options, not_reached

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Room for all prompts of the demo with their answers, so that nothing needs to be evicted. A byte is a token in
# the tiny model, and its KV is small.
_POOL_TOKENS, _POOL_TOKENS_TINY = 8192, 32768


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    model: str | None = None
    tiny: bool = False
    plot: Path | None = None
    max_new_tokens: int = 24
    threads: int | None = None
    device: str = "cpu"
    quick: bool = False


def run_demo(options: Options) -> tuple[DemoResult, dict[str, Any]]:
    """Run the demo, with progress on stderr. Returns the result and the setting it was measured in.

    Raises:
        DemoError: An option cannot be followed.
        RadixKVError: The cache cannot be made for this model or on this machine.
    """
    from radixkv.demo.plot import check_plot_path, write_plot

    if options.model is not None and options.tiny:
        raise DemoError("--model and --tiny exclude each other: give one of them")
    if options.plot is not None:
        check_plot_path(options.plot)
    _require_transformers()
    import torch
    from transformers.utils import logging

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    logging.disable_progress_bar()  # ours says the same
    model, tokenizer = load(options)
    setting = describe_setting(options, model)
    result = _measure(options, model, tokenizer)
    if options.plot is not None:
        write_plot(result, options.plot, setting["model"]["name"])
    return result, setting


def load(options: Options) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer that the options name, in float32 and evaluation mode."""
    import torch

    try:
        device = torch.device(options.device)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise DemoError(
            f"--device {options.device} cannot be used here; 'radixkv info' lists what can"
        ) from error
    if options.tiny:
        from radixkv.demo.tiny import make_tiny

        model, tokenizer = make_tiny()
    elif options.model is None:
        from radixkv.demo.weights import load_gemma

        model, tokenizer = load_gemma()
        model.name_or_path = "Gemma 3 270M"
    else:
        model, tokenizer = _load_named(options.model)
    return model.to(device), tokenizer  # type: ignore[arg-type]


def _load_named(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    looks_like_path = name.startswith((".", "/", "~")) or Path(name).expanduser().exists()
    where = str(Path(name).expanduser()) if looks_like_path else name
    if looks_like_path and not Path(where).is_dir():
        raise DemoError(f"--model {name}: there is no such folder")
    options = {} if looks_like_path else hub_options(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
        model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = first_line(error).rstrip(".")
        hint = not_reached(options, "its folder, or use --tiny")
        raise DemoError(f"--model {name} cannot be loaded: {reason}{hint}") from error
    return model.eval(), tokenizer


def _require_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise DemoError(f"the demo needs transformers: {install_hint('demo')}") from error


def _measure(options: Options, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> DemoResult:
    from radixkv.cache.prefix_cache import PrefixCache

    cache = PrefixCache.for_model(model, num_tokens=_POOL_TOKENS_TINY if options.tiny else _POOL_TOKENS)
    runner = Runner(model, tokenizer, cache, options.max_new_tokens, end_ids=turn_end_ids(tokenizer))
    chat_format, formatted = make_chat_format(tokenizer)
    workloads = make_workloads(chat_format, formatted=formatted, quick=options.quick)
    totals = {w.name: (w.title, w.num_requests) for w in workloads}
    with WorkloadBars(totals, runner.warm_up) as bars:
        result = runner.run(workloads, lambda workload, label: bars.step(workload.name, label))
    cache.check()
    return result


def make_chat_format(tokenizer: PreTrainedTokenizerBase) -> tuple[ChatFormat, bool]:
    """How to write a chat for this tokenizer, and whether that includes the tokens that start a prompt."""
    if not tokenizer.chat_template:
        return plain_chat, False

    def chat_format(messages: list[Message]) -> str:
        chat = [{"role": role, "content": content} for role, content in _without_system(tokenizer, messages)]
        return str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))

    return chat_format, True


def _without_system(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[Message]:
    """Some templates refuse a system turn: put its content in front of the first question then."""
    from jinja2 import TemplateError

    try:
        tokenizer.apply_chat_template(
            [{"role": role, "content": text} for role, text in messages[:2]], tokenize=False
        )
    except TemplateError:
        (_, system), (_, question), *rest = messages
        return [("user", f"{system}\n\n{question}"), *rest]
    return messages


def turn_end_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end an answer in a chat, where the model's own configuration may name the end of text only."""
    vocab = tokenizer.get_vocab()
    return [vocab[token] for token in ("<end_of_turn>", "<|im_end|>", "<|eot_id|>") if token in vocab]


def describe_setting(options: Options, model: PreTrainedModel) -> dict[str, Any]:
    """What the figures depend on."""
    import torch
    import transformers

    import radixkv

    return {
        "model": {
            "name": model.name_or_path,
            "architecture": type(model).__name__,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
        },
        "threads": torch.get_num_threads(),
        "max_new_tokens": options.max_new_tokens,
        "quick": options.quick,
        "versions": {
            "radixkv": radixkv.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
