"""A model without a model: KV memory of numbers, and a caller that carries out steps and mistrusts all of them.

The KV of a token is a hash of the token, its position and the KV before it, so it is right only if everything before
it was right. A slot that is stale, booked twice, not copied or copied to the wrong place is seen at the next look.
The tokens of every sequence are kept here a second time, and compared with what the scheduler says.
"""

from __future__ import annotations

import numpy as np

from radixkv.core import BlockPool, RadixTree
from radixkv.core.node import Root, below
from radixkv.sched import Scheduler, SchedulerConfig

MASK = 2**61 - 1
JUNK = -1


def kv_of(token, position, before):
    """The KV of a token; `before` is that of the token before it, or the weights'."""
    return (before * 6364136223846793005 + int(token) * 1442695040888963407 + position + 1) % MASK


def kv_of_all(tokens, weights=0):
    out, before = [], weights
    for position, token in enumerate(tokens):
        before = kv_of(token, position, before)
        out.append(before)
    return out


def next_token(kv, vocab, index=0):
    """What follows a token with that KV, in the request's sequence of that index."""
    return ((kv >> 7) + index) % vocab


def reference(prompt, num_new, vocab=97, index=0, stop=None, weights=0):
    """What comes out if a prompt is alone in the world."""
    tokens = [int(token) for token in prompt]
    kv = kv_of_all(tokens, weights)[-1]
    out = []
    while len(out) < num_new:
        out.append(next_token(kv, vocab, index))
        if out[-1] == stop:
            break
        kv = kv_of(out[-1], len(tokens) + len(out) - 1, kv)
    return out


class Caller:
    """A scheduler, the memory that it schedules, and who does what its steps say.

    After `change_weights`, KV that was computed before is worthless.
    """

    def __init__(
        self, num_blocks=28, block_size=4, host_blocks=0, vocab=97, stop=None, checks=True, **config
    ):
        self.pool = BlockPool(num_blocks)
        self.tree = RadixTree(self.pool, block_size)
        self.host = BlockPool(host_blocks) if host_blocks else None
        self.scheduler = Scheduler(self.tree, SchedulerConfig(**config), self.host)
        self.block_size, self.vocab, self.stop, self.checks = block_size, vocab, stop, checks
        self.memory = np.full((num_blocks, block_size), JUNK, np.int64)
        self.host_memory = np.full((max(host_blocks, 1), block_size), JUNK, np.int64)
        self.longest = self.scheduler.config.max_seq_len or 2**40
        self.weights = 0
        self.before = None
        self.tokens = {}  # of each sequence
        self.known = {}  # the KV of cached tokens; only saves time
        self.kv = {}  # what the KV of those must be
        self.computed = []  # of each step: (sequence, first position, behind the last)
        self.ended = []
        self.guests = []  # references on blocks that others hold

    # -- requests --------------------------------------------------------------------------------------------

    def add(self, prompt, new=8, **options):
        if self.weights:
            options.setdefault("namespace", b"w%d" % self.weights)
        return self.scheduler.add(prompt, max_new_tokens=new, **options)

    def fork(self, seq):
        child = self.scheduler.fork(seq)
        self.tokens[child] = list(self.tokens_of(seq))
        return child

    def change_weights(self):
        self.weights += 1
        name = b"w%d" % self.weights
        self.kv.clear()
        self.scheduler.restart(lambda request: name)

    def tokens_of(self, seq):
        if seq not in self.tokens:
            self.tokens[seq] = seq.request.tokens.tolist()
        return self.tokens[seq]

    def kv_until(self, seq, stop):
        """What the KV of the first tokens of a sequence must be."""
        tokens, kv = self.tokens_of(seq), self.kv.setdefault(seq, [])
        while len(kv) < stop:
            kv.append(kv_of(tokens[len(kv)], len(kv), kv[-1] if kv else self.weights))
        return kv[:stop]

    # -- steps -----------------------------------------------------------------------------------------------

    def move(self, step):
        """The step's moves, in their order."""
        for moves in (step.swap_out, step.swap_in, step.copies):
            assert len(moves.src) == len(moves.dst)
            assert len(set(moves.dst.tolist())) == len(moves.dst)
        assert not set(step.swap_in.dst.tolist()) & set(step.swap_out.src.tolist())
        assert not set(step.copies.dst.tolist()) & {*step.swap_out.src.tolist(), *step.swap_in.dst.tolist()}
        self.host_memory[step.swap_out.dst] = self.memory[step.swap_out.src]
        self.memory[step.swap_in.dst] = self.host_memory[step.swap_in.src]
        self.memory[step.copies.dst] = self.memory[step.copies.src]

    def forward(self, step, last_entry=None):
        """Compute the step's tokens (those of the first entries only, if told so); the sampled ones."""
        size, scheduler = self.block_size, self.scheduler
        assert len(set(step.slot_mapping.tolist())) == step.num_tokens  # nobody writes where another one does
        assert step.query_starts.tolist() == [0, *np.cumsum(step.query_lens).tolist()]
        assert (step.query_lens[: step.num_decodes] == 1).all()
        assert step.num_tokens <= scheduler.config.max_batched_tokens
        keys = [scheduler.sequence(row).key for row in step.rows[: step.num_decodes].tolist()]
        assert keys == sorted(keys)
        last_kv = []
        for i, row in enumerate(step.rows.tolist()[:last_entry]):
            seq = scheduler.sequence(row)
            start, stop = step.query_starts[i : i + 2].tolist()
            context = int(step.context_lens[i])
            first = context - (stop - start)
            positions = np.arange(first, context)
            assert step.positions[start:stop].tolist() == positions.tolist()
            assert step.token_ids[start:stop].tolist() == self.tokens_of(seq)[first:context]
            table = step.block_tables[i, : -(-context // size)]
            slots = table[positions // size].astype(np.int64) * size + positions % size
            assert step.slot_mapping[start:stop].tolist() == slots.tolist()
            want = self.kv_until(seq, context)
            have = self.memory[table].reshape(-1)[:first].tolist()
            assert have == want[:first], f"{seq} reads {have}, should read {want[:first]} in {table}"
            self.memory.reshape(-1)[slots] = want[first:]
            last_kv.append(want[-1])
        return last_kv

    def sample(self, step, last_kv):
        tokens, reasons = [], {}
        for i, (entry, seq) in enumerate(zip(step.sampling.tolist(), step.sampling_seqs, strict=True)):
            tokens.append(next_token(last_kv[entry], self.vocab, seq.index % max(1, seq.request.n)))
            if tokens[-1] == self.stop:
                reasons[i] = "stop"
        return np.array(tokens, np.int64), reasons

    def complete(self, step, tokens, reasons=None):
        # Those that were dropped meanwhile get no token, nor those that were to fork from one that was.
        live = [seq.state == "running" for seq in step.sampling_seqs]
        for seq, token, alive in zip(step.sampling_seqs, tokens.tolist(), live, strict=True):
            if alive:
                self.tokens_of(seq).append(token)
        self.computed += [
            (self.scheduler.sequence(row), int(end - num), int(end))
            for row, num, end in zip(step.rows.tolist(), step.query_lens, step.context_lens, strict=True)
        ]
        self.before = None
        done = self.scheduler.complete(step, tokens, reasons)
        assert done.ignored == [i for i, alive in enumerate(live) if not alive]
        self.ended += done.finished
        for seq in step.sampling_seqs:
            assert seq.all_tokens().tolist() == self.tokens_of(seq)
        return done

    def snapshot(self):
        """All that a failed step must leave as it was. (What it evicted stays evicted.)"""
        scheduler, rows = self.scheduler, self.scheduler._rows
        seqs = [seq for request in scheduler._requests.values() for seq in request.sequences]
        state = {
            seq: (
                seq.state,
                seq.row,
                seq.num_computed,
                seq.all_tokens().tolist(),
                seq.num_preemptions,
                rows.table(seq.row).tolist() if seq.row >= 0 else None,
                bool(rows.shared[seq.row]) if seq.row >= 0 else None,
                seq._host.tolist() if seq._host is not None else None,
                seq._prefilling,
                seq._started,
                [follower.key for follower in seq._followers],
                seq.request.num_cached_tokens,
            )
            for seq in seqs
        }
        # Who waits for a prefix of one that is still computing it may go on waiting.
        parked = [seq for some in scheduler._books.prefilling for _, seq in some._waiters]
        queue = sorted(seq.key for seq in [*scheduler._admission.queue.ready(), *parked])
        running = [
            [seq.key for seq in some] for some in (scheduler._books.decoding, scheduler._books.prefilling)
        ]
        return state, queue, running, len(scheduler._admission.pending), self.counters()

    def counters(self):
        counters = self.scheduler._books.counters
        return {name: getattr(counters, name) for name in counters.__slots__}

    def schedule(self):
        self.before = self.snapshot() if self.checks else None
        self.num_requests = len(self.scheduler._requests)  # more of them, and the snapshot is of no use
        step = self.scheduler.schedule()
        if step is not None:
            self.ended += step.finished
            assert step.num_tokens or step.swap_out.num_blocks or step.finished or step.preempted
            if self.checks:
                self.check()
        return step

    def step(self):
        """One whole step; whether there was something to do."""
        step = self.schedule()
        if step is None:
            return False
        self.move(step)
        tokens, reasons = self.sample(step, self.forward(step))
        self.complete(step, tokens, reasons)
        if self.checks:
            self.check()
        return True

    def fail(self, step, progress):
        """A step that goes wrong: after nothing, after its moves, or after part of its forward."""
        if progress > 0:
            self.move(step)
        if progress > 1:
            self.forward(step, last_entry=(progress - 2) * step.num_seqs // 2)
        stands = step.finished or any(seq.state == "waiting" for seq in step.preempted)
        undisturbed = not (stands or step.plan.disturbed)
        self.scheduler.fail(step)
        if self.before is not None and undisturbed and len(self.scheduler._requests) == self.num_requests:
            assert self.snapshot() == self.before
        self.before = None

    def run(self, most=20_000):
        """Steps until all is finished."""
        for _ in range(most):
            if not self.step():
                assert not self.scheduler.has_unfinished
                return
        raise AssertionError(f"no end after {most} steps: {self.scheduler}")

    # -- checks ----------------------------------------------------------------------------------------------

    def check(self):
        self.scheduler.check(exclusive=not self.guests)
        self.tree.check()
        self.check_cached()

    def check_cached(self):
        """The blocks of the tree hold the KV of the tokens that it says they hold."""
        for root in self.tree._roots.values():
            weights = next(w for name, w in self.weights_by_root() if name == root.namespace)
            for node in below(root):
                if node.num_children:
                    continue
                edges, ids = [], []
                while not isinstance(node, Root):
                    edges.append(np.frombuffer(bytes(node.edge), np.int64))
                    ids.append(np.frombuffer(bytes(node.blocks), np.int32))
                    node = node.parent
                tokens, ids = np.concatenate(edges[::-1]), np.concatenate(ids[::-1])
                have = self.memory[ids].reshape(-1)[: len(tokens)].tolist()
                assert have == self.kv_of_cached(tokens, weights), f"cached {tokens} in {ids}: {have}"

    def kv_of_cached(self, tokens, weights):
        key = tokens.tobytes(), weights
        if key not in self.known:
            self.known[key] = kv_of_all(tokens.tolist(), weights)
        return self.known[key]

    def weights_by_root(self):
        for root in self.tree._roots.values():
            name = root.namespace
            yield name, int(name.partition(b":w")[2] or 0)

    def check_outputs(self, requests):
        """Every sequence has what it would have made alone; or the first part of that, if it ended early."""
        for request in requests:
            for seq in request.sequences[: request.n]:
                new = min(request.max_new_tokens, self.longest - len(request.tokens))
                want = reference(request.tokens, new, self.vocab, seq.index, self.stop, self.weights)
                have = seq.output_tokens.tolist()
                if seq.finish_reason in ("length", "stop"):
                    assert have == want, f"{seq}: {have} instead of {want}"
                else:
                    assert seq.finish_reason in ("abort", "capacity", "test")
                    assert have == want[: len(have)], f"{seq}: {have} does not begin {want}"

    def check_empty(self):
        """When all is finished and evicted, the pool is as it was new."""
        scheduler = self.scheduler
        assert not scheduler.has_unfinished
        assert scheduler.schedule() is None
        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_swapped) == (0, 0, 0)
        self.check()
        assert self.tree.num_pinned_blocks == 0
        assert self.pool.num_free + self.tree.num_evictable_blocks == self.pool.num_blocks
        self.tree.evict(self.pool.num_blocks)
        assert self.pool.num_free == self.pool.num_blocks
        if self.host is not None:
            assert self.host.num_free == self.host.num_blocks
        assert len(scheduler._admission.pending) == 0
        assert scheduler._rows.num_free == scheduler.config.max_num_seqs
