"""The stand-in for FlashInfer notices what breaks the contract, and computes what the formula says."""

from __future__ import annotations

import math

import pytest
import torch

from radixkv.attention.flashinfer_kinds import workspace_need
from tests.attention.fake_flashinfer import ContractError, Double, FakeTransfers
from tests.attention.fake_flashinfer.maths import workspace_bytes
from tests.attention.test_backends import plain_spec

BF16 = torch.bfloat16


class Case:
    """A decode and a prompt over pages of 4, in the arguments of `plan` and `run`."""

    def __init__(self, double=None):
        self.double = double or Double()
        self.workspace = torch.zeros(1 << 20, dtype=torch.uint8)
        self.pages = 9
        self.plan_args = dict(
            indptr=torch.tensor([0, 2, 5], dtype=torch.int32),
            indices=torch.tensor([3, 1, 7, 0, 8], dtype=torch.int32),
            last_page_len=torch.tensor([4, 1], dtype=torch.int32),
            num_qo_heads=4, num_kv_heads=1, head_dim=64, page_size=4,
        )  # fmt: skip
        self.options = dict(
            window_left=-1, logits_soft_cap=None, sm_scale=0.1, q_data_type=BF16, kv_data_type=BF16
        )
        generator = torch.Generator().manual_seed(0)
        self.keys, self.values = (
            torch.randn(self.pages, 4, 1, 64, generator=generator).to(BF16) for _ in range(2)
        )
        self.q = torch.randn(2, 4, 64, generator=generator).to(BF16)
        self.lse = torch.empty(2, 4)

    def wrapper(self, **options):
        return self.double.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace, "NHD", **{"use_tensor_cores": True, "backend": "fa2", **options}
        )

    def plan(self, wrapper=None, **changes):
        wrapper = wrapper or self.wrapper()
        args = {**self.plan_args, **{k: v for k, v in changes.items() if k in self.plan_args}}
        options = {**self.options, **{k: v for k, v in changes.items() if k not in self.plan_args}}
        wrapper.plan(*args.values(), **options)
        return wrapper

    def run(self, wrapper, **changes):
        args = dict(q=self.q, cache=(self.keys, self.values), out=torch.empty_like(self.q), lse=self.lse)
        args.update(changes)
        q, cache = args.pop("q"), args.pop("cache")
        return wrapper.run(q, cache, return_lse=True, **args)


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def test_it_computes_the_formula_with_a_log_sum_exp_of_base_2():
    case = Case()
    out, lse = case.run(case.plan())
    for row, (pages, length) in enumerate([([3, 1], 8), ([7, 0, 8], 9)]):
        key, value = (pool[pages].flatten(0, 1)[:length, 0].double() for pool in (case.keys, case.values))
        logits = case.q[row].double() @ key.T * 0.1
        torch.testing.assert_close(out[row].double(), logits.softmax(1) @ value, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse[row].double(), logits.logsumexp(1) / math.log(2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indptr": torch.tensor([0, 2, 5])}, "indptr must be int32"),
        ({"indices": torch.tensor([3, 1, 7, 0, 8])}, "indices must be int32"),
        ({"last_page_len": torch.tensor([4, 1])}, "last_page_len must be int32"),
        ({"indptr": int32(0), "indices": int32(), "last_page_len": int32()}, "empty batch"),
        ({"indptr": int32(0, 5)}, "batch \\+ 1"),
        ({"indptr": int32(1, 2, 5)}, "start at 0"),
        ({"indptr": int32(0, 0, 5)}, "at least one page"),
        ({"indptr": int32(0, 2, 4)}, "indices must be"),
        ({"last_page_len": int32(0, 1)}, "last_page_len must lie"),
        ({"last_page_len": int32(4, 5)}, "last_page_len must lie"),
        ({"indptr": [0, 2, 5]}, "must be a tensor"),
        ({"indices": int32(3, 3, 1, 1, 7, 7, 0, 0, 8, 8)[::2]}, "one row"),
        ({"head_dim": 32}, "head_dim of 32"),
        ({"num_kv_heads": 3}, "must divide"),
        ({"q_data_type": torch.float32}, "no kernel for"),
        ({"kv_data_type": None}, "kv_data_type"),
        ({"window_left": -2}, "window_left"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap"),
    ],
)  # fmt: skip
def test_plans_that_break_the_contract(changes, message):
    case = Case()
    with pytest.raises(ContractError, match=message):
        case.plan(**changes)


def test_a_dtype_that_is_not_given_and_an_argument_that_is_not_known():
    case = Case()
    del case.options["q_data_type"]
    with pytest.raises(ContractError, match="float16 unless"):
        case.plan()
    with pytest.raises(TypeError, match="knows no colour"):
        Case().plan(colour=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda c: {"q": c.q[:1]}, "as planned"),
        (lambda c: {"q": c.q.repeat(1, 1, 2)[..., ::2]}, "q must be contiguous"),
        (lambda c: {"out": torch.empty(2, 4, 32, dtype=BF16)}, "out must be as q"),
        (lambda c: {"out": torch.empty(2, 4, 64)}, "out must be as q"),
        (lambda c: {"out": torch.empty(4, 2, 64, dtype=BF16).transpose(0, 1)}, "out must be contiguous"),
        (lambda c: {"lse": torch.empty(2, 4, dtype=torch.float64)}, "lse must be float32"),
        (lambda c: {"cache": (c.keys[:8], c.values[:8])}, "page ids must lie in 0..7"),
        (lambda c: {"cache": (c.keys[:, :2], c.values[:, :2])}, "pages must be"),
        (lambda c: {"cache": (c.keys, torch.stack([c.values, c.values], 1)[:, 0])}, "same strides"),
        (lambda c: {"sinks": torch.zeros(4)}, "ignores sinks"),
    ],
)  # fmt: skip
def test_runs_that_break_the_contract(make, message):
    case = Case()
    with pytest.raises(ContractError, match=message):
        case.run(case.plan(), **make(case))


def test_what_the_package_itself_refuses_is_refused_as_it_does():
    case = Case()
    wrapper = case.plan()
    with pytest.raises(KeyError, match="tuple"):
        case.run(wrapper, cache=[case.keys, case.values])
    with pytest.raises(ValueError, match="q_data_type"):
        case.run(wrapper, q=case.q.half())
    with pytest.raises(ValueError, match="kv_data_type"):
        case.run(wrapper, cache=(case.keys.half(), case.values.half()))


def test_run_before_plan_and_plan_before_the_last_one_was_read():
    case = Case()
    with pytest.raises(ContractError, match="run before plan"):
        case.run(case.wrapper())
    wrapper = case.plan()
    case.run(wrapper)  # says nothing about what the host knows
    with pytest.raises(ContractError, match="planned again"):
        case.plan(wrapper)
    case.double.synchronize()
    case.plan(wrapper)


def test_a_plan_of_an_earlier_step():
    case = Case()
    transfers = FakeTransfers(torch.device("cpu"), case.double.timeline)
    transfers.host(4)[:] = 0
    case.plan_args["indices"] = transfers.send(4)
    case.plan_args.update(indptr=int32(0, 2, 4), last_page_len=int32(1, 1))
    wrapper = case.plan()
    case.run(wrapper)
    transfers.host(4)[:] = 1
    transfers.send(4)
    with pytest.raises(ContractError, match="earlier step"):
        case.run(wrapper)


def test_tensors_on_the_wrong_side():
    case = Case()
    transfers = FakeTransfers(torch.device("cpu"), case.double.timeline)
    transfers.host(8)[:] = [0, 2, 5, 0, 0, 0, 0, 0]
    sent = transfers.send(8)
    with pytest.raises(ContractError, match="indices must be on the device"):
        case.plan()
    with pytest.raises(ContractError, match="hidden wait"):
        case.plan(indptr=sent[:3], indices=sent[3:])


def test_page_locked_memory_that_is_written_too_early():
    double = Double()
    transfers = FakeTransfers(torch.device("cpu"), double.timeline)
    buffer = transfers.host(4)
    buffer[:] = 1
    transfers.send(4)
    buffer[:] = 2
    with pytest.raises(ContractError, match="before its transfer"):
        double.synchronize()


def test_two_buffers_in_turn_wait_for_the_step_before_last():
    double = Double()
    transfers = FakeTransfers(torch.device("cpu"), double.timeline)
    sent = []
    for step in range(5):
        transfers.host(3)[:] = step
        sent.append(transfers.send(3))
    assert [tensor.tolist() for tensor in sent] == [[step] * 3 for step in range(5)]
    assert transfers.num_waits == 3
    double.synchronize()
    transfers.host(3)
    assert transfers.num_waits == 3


def test_groups_and_backends_without_a_kernel():
    case = Case()
    with pytest.raises(ContractError, match="group of 5"):
        case.plan(case.wrapper(use_tensor_cores=False), num_qo_heads=5)
    case.plan(case.wrapper(use_tensor_cores=False))
    with pytest.raises(ContractError, match="say fa2"):
        case.wrapper(backend="auto")


def test_prompts_that_break_the_contract():
    case = Case()
    wrapper = case.double.BatchPrefillWithPagedKVCacheWrapper(case.workspace, "NHD", backend="fa2")
    plan = list(case.plan_args.values())
    for starts, message in [
        (int32(0, 9, 10), "no more rows than keys"),
        (int32(0, 0, 1), "at least one row"),
    ]:
        with pytest.raises(ContractError, match=message):
            wrapper.plan(starts, *plan, causal=True, **case.options)
    with pytest.raises(ContractError, match="max_token_per_sequence"):
        wrapper.plan(int32(0, 2, 3), *plan, causal=True, max_token_per_sequence=3, **case.options)
    wrapper.plan(int32(0, 2, 3), *plan, causal=True, max_token_per_sequence=2, **case.options)
    with pytest.raises(ContractError, match="as planned"):
        case.run(wrapper)


def test_a_window_reads_what_lies_before_it():
    case = Case()
    case.values[7, 0] = float("nan")
    wrapper = case.plan(window_left=2)
    with pytest.raises(ContractError, match="multiplied by 0"):
        case.run(wrapper)


def test_the_workspace_may_be_too_small():
    case = Case()
    pages = 2000
    case.plan_args.update(
        indptr=int32(0, pages, pages + 1),
        indices=torch.zeros(pages + 1, dtype=torch.int32),
        last_page_len=int32(4, 1),
    )
    with pytest.raises(RuntimeError, match="Buffer overflow when allocating memory for batch_prefill_tmp_v"):
        case.plan()
    case.workspace = torch.zeros(64 << 20, dtype=torch.uint8)
    case.plan()


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (64, 8), (8, 8), (8, 1), (7, 1)])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 4096])
def test_no_step_needs_more_workspace_than_is_made(heads, kv_heads, dim, window):
    spec = plain_spec(window, heads, kv_heads, dim)
    worst = workspace_need(spec, 132)
    largest = 0
    for rows in (1, 4, 17, 64, 500):
        for requests in (1, 3, 16, 64, 264):
            for pages in (1, 30, 2000, 8000):
                packed = torch.full((requests,), rows * heads // kv_heads)
                left = -1 if window is None else window - 1
                need = workspace_bytes(
                    packed, torch.full((requests,), pages), 16, left, heads, kv_heads, dim, 132
                )
                largest = max(largest, need)
    assert worst / 8 < largest <= worst


def test_merging():
    case = Case()
    v, other = (torch.randn(3, 4, 64).to(BF16) for _ in range(2))
    s, s_other = torch.randn(3, 4), torch.randn(3, 4)
    expected, lse = case.double.merge_state(v, s, other, s_other)
    weight = torch.exp2(s) / (torch.exp2(s) + torch.exp2(s_other))
    right = weight[..., None] * v + (1 - weight)[..., None] * other
    torch.testing.assert_close(expected.float(), right, rtol=1e-2, atol=1e-2)
    before = v.clone()
    other[1] = float("nan")
    case.double.merge_state_in_place(v, s, other, s_other, mask=torch.tensor([True, False, True]))
    assert torch.equal(v[[0, 2]], expected[[0, 2]])
    assert torch.equal(v[1], before[1])
    assert torch.equal(s[[0, 2]], lse[[0, 2]])
    for wrong, message in [
        ((v, s.double(), other, s_other), "result of the merge is lost"),
        ((v, s, other[:2], s_other), "states differ"),
        ((v, s[:, :2], other, s_other), "contiguous"),
        ((v, s, other.float(), s_other), "one dtype"),
    ]:
        with pytest.raises(ContractError, match=message):
            case.double.merge_state_in_place(*wrong)
    with pytest.raises(ContractError, match="65 heads of 128 need 1040 threads"):
        case.double.merge_state(*(torch.zeros(1, 65, 128, dtype=BF16), torch.zeros(1, 65)) * 2)


def test_appending():
    case = Case()
    double = case.double
    keys, values = (torch.zeros(9, 4, 1, 64) for _ in range(2))
    table = int32(3, 1, 7), int32(0, 2, 3), int32(2, 1)
    lens = double.get_seq_lens(table[1], table[2], 4)
    assert lens.tolist() == [6, 1]
    which, where = double.get_batch_indices_positions(int32(0, 3, 4), lens, 4)
    assert (which.tolist(), where.tolist()) == ([0, 0, 0, 1], [3, 4, 5, 0])
    new = torch.arange(1, 5).view(4, 1, 1).expand(4, 1, 64).float()
    double.append_paged_kv_cache(new, 10 * new, which, where, (keys, values), *table)
    assert keys[3, 3, 0, 0] == 1
    assert keys[1, :2, 0, 0].tolist() == [2, 3]
    assert values[7, 0, 0, 0] == 40
    with pytest.raises(ContractError, match="padded rows"):
        double.append_paged_kv_cache(new, new, torch.full_like(which, -1), where, (keys, values), *table)


def test_graphs_keep_their_buffers_and_pad_with_empty_rows():
    case = Case(Double(num_sms=16))
    buffers = (
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(20, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
    )
    wrapper = case.wrapper(
        use_cuda_graph=True,
        paged_kv_indptr_buffer=buffers[0],
        paged_kv_indices_buffer=buffers[1],
        paged_kv_last_page_len_buffer=buffers[2],
    )
    with pytest.raises(ContractError, match="graph of a batch of 3"):
        case.plan(wrapper)
    case.plan(wrapper, indptr=int32(0, 2, 5, 5), last_page_len=int32(4, 1, 0))
    q = torch.cat([case.q, case.q[:1]])
    out, lse = wrapper.run(q, (case.keys, case.values), return_lse=True)
    expected, _ = case.run(case.plan())
    assert torch.equal(out[:2], expected)
    assert not out[2].any()
    assert (lse[2] < -4e4).all()


def test_the_cuda_core_kernel_takes_no_empty_rows_in_graphs():
    """Its scheduler does not count them where it looks for a split that fits its tables, and then writes them, too."""
    case = Case()
    buffers = [torch.zeros(size, dtype=torch.int32) for size in (4, 20, 3)]
    names = "paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"
    wrapper = case.wrapper(
        use_cuda_graph=True, use_tensor_cores=False, **dict(zip(names, buffers, strict=True))
    )
    table = dict(indptr=int32(0, 2, 5, 5), last_page_len=int32(4, 1, 0))
    with pytest.raises(ContractError, match="empty rows"):
        case.plan(wrapper, **table)


def test_graphs_need_room_for_the_most_that_a_launch_may_be():
    buffers = [torch.zeros(size, dtype=torch.int32) for size in (4, 20, 3)]
    names = "paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer"
    table = dict(indptr=int32(0, 2, 4, 5), last_page_len=int32(4, 1, 2))
    for case, fits in ((Case(), False), (Case(Double(num_sms=16)), True)):
        wrapper = case.wrapper(use_cuda_graph=True, **dict(zip(names, buffers, strict=True)))
        if fits:
            case.plan(wrapper, **table)
        else:
            with pytest.raises(RuntimeError, match="increase the workspace"):
                case.plan(wrapper, **table)
