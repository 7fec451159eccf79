"""The shim itself: kernels that are right give right results in any order, planted faults are found and named."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from tests.cuda_on_host import library

SEEDS = range(6)


class Fixtures:
    """The kernels of ``kernels/`` in one build."""

    def __init__(self, kind: str) -> None:
        self.path = library.build(
            kind, (library.HERE / "kernels").glob("*.cu"), "fixtures", with_torch=False
        )
        self.library = ctypes.CDLL(str(self.path))

    def run(self, kernel: str, x: Tensor, out: Tensor, blocks: int, threads: int) -> None:
        call = getattr(self.library, f"run_{kernel}")
        call.restype = ctypes.c_char_p
        message = call(
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int64(blocks),
            threads,
        )
        if message is not None:
            raise RuntimeError(message.decode())

    def seed(self, seed: int) -> None:
        self.library.cuda_on_host_reseed(ctypes.c_uint64(seed))


@pytest.fixture(scope="module", params=("plain", "checked"))
def fixtures(request: pytest.FixtureRequest) -> Fixtures:
    return Fixtures(request.param)


@pytest.fixture(scope="module")
def plain() -> Fixtures:
    return Fixtures("plain")


@pytest.fixture(scope="module")
def checked() -> Fixtures:
    return Fixtures("checked")


@pytest.mark.parametrize("seed", SEEDS)
def test_scan_and_reductions_of_a_block(fixtures: Fixtures, seed: int) -> None:
    fixtures.seed(seed)
    x = torch.randint(-9, 9, (5, 1024), dtype=torch.int32)
    sums = torch.empty_like(x)
    fixtures.run("block_scan", x, sums, 5, 1024)
    assert torch.equal(sums, x.cumsum(1).to(torch.int32))
    y, span = torch.randn(7, 256), torch.empty(7)
    fixtures.run("block_range", y, span, 7, 256)
    assert torch.equal(span, y.amax(1) - y.amin(1))


@pytest.mark.parametrize("seed", SEEDS)
def test_match_and_votes(fixtures: Fixtures, seed: int) -> None:
    fixtures.seed(seed)
    keys = torch.randint(0, 5, (3, 2, 32))
    got = torch.empty(3, 2, 32, 4, dtype=torch.int32)
    fixtures.run("rank_among_equals", keys, got, 3, 64)
    before = torch.ones(32, 32, dtype=torch.bool).tril(-1)
    rank = ((keys[..., :, None] == keys[..., None, :]) & before).sum(-1)
    assert torch.equal(got[..., 0].long(), rank)
    bits = ((keys > 0) << torch.arange(32)).sum(-1, keepdim=True).expand_as(keys)
    assert torch.equal(got[..., 1].long() & 0xFFFFFFFF, bits)
    assert torch.equal(got[..., 2] != 0, (keys > 3).any(-1, keepdim=True).expand_as(keys))
    assert bool((got[..., 3] != 0).all())


def shuffled(x: Tensor) -> Tensor:
    """What CUDA's guide says of shfl 11, up 3, down 3 and xor 5 in groups of 8 lanes."""
    lane = torch.arange(32)
    group, place = lane // 8 * 8, lane % 8
    sources = [
        group + 11 % 8,
        torch.where(place >= 3, lane - 3, lane),
        torch.where(place < 5, lane + 3, lane),
        lane ^ 5,
    ]
    return torch.stack([x[:, source] for source in sources], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_shuffles_in_groups(fixtures: Fixtures, dtype: torch.dtype) -> None:
    x = torch.randn(4, 32, dtype=dtype)
    got = torch.empty(4, 32, 4, dtype=dtype)
    name = "shuffle_floats" if dtype == torch.float32 else "shuffle_doubles"
    fixtures.run(name, x, got, 1, 128)
    assert torch.equal(got, shuffled(x))


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_that_part_and_meet_under_their_masks(fixtures: Fixtures, seed: int) -> None:
    fixtures.seed(seed)
    x = torch.randint(0, 99, (3, 2, 32), dtype=torch.int32)
    got = torch.empty_like(x)
    fixtures.run("halves_apart", x, got, 3, 64)
    low, high = x[..., :16].sum(-1, keepdim=True), x[..., 16:17]
    expected = torch.cat([low.expand(3, 2, 16), high.expand(3, 2, 16)], -1)
    assert torch.equal(got.long(), expected)


def test_votes_of_a_block(fixtures: Fixtures) -> None:
    x = torch.randint(0, 7, (3, 96), dtype=torch.int32)
    x[1, 5], x[2, 7] = 7, -2
    got = torch.empty(3, 3, dtype=torch.int32)
    fixtures.run("block_votes", x, got, 3, 96)
    odd = (x % 2 != 0).sum(1).tolist()
    assert got.tolist() == [[0, 1, odd[0]], [1, 1, odd[1]], [0, 0, odd[2]]]


@pytest.mark.parametrize("seed", SEEDS)
def test_atomics(fixtures: Fixtures, seed: int) -> None:
    fixtures.seed(seed)
    x = torch.randint(-50, 50, (6, 128), dtype=torch.int32)
    got = torch.tensor([0, 1000, -1000, 0, 0], dtype=torch.int32)
    fixtures.run("atomics", x, got, 6, 128)
    total = int(x.sum())
    assert got.tolist() == [total, int(x.min()), int(x.max()), total, int((x == 0).sum())]


@pytest.mark.parametrize("seed", SEEDS)
def test_exchange_under_a_barrier_of_the_warp(fixtures: Fixtures, seed: int) -> None:
    fixtures.seed(seed)
    x = torch.randint(0, 99, (2, 128), dtype=torch.int32)
    got = torch.empty_like(x)
    fixtures.run("exchange_in_warp", x, got, 2, 128)
    assert torch.equal(got, x + 2)


def floats() -> Tensor:
    """Every upper half of a float, below, at and above the middle between bfloat16 neighbours; halves' own middles."""
    top = torch.arange(-(2**15), 2**15, dtype=torch.int32)[:, None] << 16
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return (top | low.to(torch.int32)).flatten().view(torch.float32)


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("half", torch.float16)], ids=("bf16", "half")
)
def test_conversions_are_torch_s(plain: Fixtures, name: str, dtype: torch.dtype) -> None:
    """All 65536 values to float32, and floats of every exponent and sign: ties, subnormals, infinities, NaN."""
    x = floats()
    got = torch.empty(x.shape, dtype=torch.int16)
    plain.run(f"to_{name}", x, got, x.numel() // 512, 512)
    expected, number = x.to(dtype), ~x.isnan()
    assert torch.equal(got[number], expected.view(torch.int16)[number])
    assert bool(got.view(dtype)[~number].isnan().all())

    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    back = torch.empty(2**16)
    plain.run(f"from_{name}", every, back, 128, 512)
    wide, number = every.view(dtype).float(), ~every.view(dtype).isnan()
    assert torch.equal(back[number].view(torch.int32), wide[number].view(torch.int32))
    assert bool(back[~number].isnan().all())


def test_a_launch_out_of_range_is_a_fault(plain: Fixtures) -> None:
    x = torch.zeros(4, dtype=torch.int32)
    for blocks, threads in ((1, 1025), (1, 0), (2**31, 1)):
        with pytest.raises(RuntimeError, match="out of range"):
            plain.run("block_scan", x, x, blocks, threads)


def marked_line(kernel: str) -> str:
    """Where the fault of a kernel is."""
    lines = (library.HERE / "kernels" / "faults.cu").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if f"void {kernel}(" in line)
    return (
        f"faults.cu:{next(i for i in range(start, len(lines)) if lines[i].endswith('// here')) + 1}"
    )


def test_missing_barrier_gives_wrong_results_under_some_seed(plain: Fixtures) -> None:
    x = torch.arange(256, dtype=torch.int32)
    wrong = 0
    for seed in SEEDS:
        plain.seed(seed)
        got = torch.empty_like(x)
        plain.run("missing_barrier", x, got, 1, 256)
        wrong += not torch.equal(got, x.flip(0))
    assert wrong == len(SEEDS)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        # Whichever of the two comes second; who reads first reads what nobody has written.
        ("missing_barrier", r"shared\+\d+ at (LINE|faults.cu:\d+, which .* read at LINE)"),
        ("missing_second_barrier", r"race .* shared\+\d+ at .*LINE"),
        ("shuffle_for_a_barrier", r"shared\+\d+ at (LINE|faults.cu:\d+, which .* read at LINE)"),
        ("two_writers", r"writes last\+0 at LINE, which thread \d+ wrote at LINE"),
        ("nobody_wrote", r"reads shared\+\d+ at LINE, which no thread of the block has written"),
    ],
)
def test_races_are_found_and_named(checked: Fixtures, kernel: str, message: str) -> None:
    x, out = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    message = message.replace("LINE", marked_line(kernel))
    for seed in SEEDS:
        checked.seed(seed)
        with pytest.raises(RuntimeError, match=rf"{kernel}\(.*block 0, thread \d+: .*{message}"):
            checked.run(kernel, x, out, 1, 64)


def test_shared_memory_starts_as_garbage(plain: Fixtures) -> None:
    x, out = torch.zeros(64), torch.zeros(64)
    plain.run("nobody_wrote", x, out, 1, 64)
    assert bool(out.isnan().all())


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        ("misaligned_quad", "misaligned address: .* needs a multiple of 16, it is 4 beyond one"),
        ("divergent_shuffle", "the lanes of a warp diverge"),
        ("masks_differ", "the lanes of a warp diverge|returned while lanes of its warp wait"),
        ("absent_lane", "returned while lanes|which have returned"),
        ("unnamed_source", "reads lane 20, which its mask 0x0000ffff does not name"),
        ("early_return", "returned while other threads wait|threads of its block have returned"),
        ("two_barriers", "while other threads wait at that of faults.cu"),
        ("waits_in_a_ring", "(?s)no thread can go on:.*wait at the barrier.*wait in __syncwarp"),
    ],
)
def test_faults_of_control_flow_and_alignment(
    fixtures: Fixtures, kernel: str, message: str
) -> None:
    x, out = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    for seed in SEEDS:
        fixtures.seed(seed)
        with pytest.raises(RuntimeError, match=rf"{kernel}\(.*block 0, thread \d+: ") as caught:
            fixtures.run(kernel, x, out, 1, 64)
        assert caught.match(message)
    # The next launch is none the worse for it.
    fixtures.run("block_votes", x, out, 1, 64)
    assert out[:3].tolist() == [0, 1, 0]


CALL = """
import ctypes, sys
library = ctypes.CDLL(sys.argv[1])
call = getattr(library, sys.argv[2])
call.restype = ctypes.c_char_p
n = 256
x, out = (ctypes.c_int * n)(*range(n)), (ctypes.c_int * n)()
message = call(x, out, ctypes.c_int64(2), n // 2)
print(message, [out[i] for i in (0, 127, 255)])
"""


def under_sanitizers(kernel: str) -> subprocess.CompletedProcess[str]:
    path = library.build(
        "address", (library.HERE / "kernels").glob("*.cu"), "fixtures", with_torch=False
    )
    return subprocess.run(
        [sys.executable, "-c", CALL, str(path), f"run_{kernel}"],
        env=os.environ | library.sanitizer_environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_sanitizers_see_through_the_fibers() -> None:
    right = under_sanitizers("block_scan")
    assert right.returncode == 0, right.stderr
    assert right.stdout.split() == ["None", "[0,", "8128,", f"{sum(range(128, 256))}]"]
    too_far = under_sanitizers("one_too_far")
    assert too_far.returncode != 0
    assert "heap-buffer-overflow" in too_far.stderr
    assert "in one_too_far(int const*, int*)" in too_far.stderr
    misaligned = under_sanitizers("misaligned_quad")
    assert "misaligned address" in misaligned.stderr
    assert marked_line("misaligned_quad") in misaligned.stderr
