// Scans along the rows of a batch: x_p = b_p + a_p x_{p-1} over positions p counted from one end of
// each row, with the values of a Problem on the way in and out.
//
// A row is cut into blocks of 256 positions from its anchor, and one warp takes a block: eight
// positions a thread, threads combined by a fixed tree, then value = x + a * carry. Blocks of a row
// are chained by that formula alone, one after the other. Which warps take which blocks, and
// whether the chain runs inside one thread block or over the whole grid, therefore changes no bit,
// and neither does padding on either side of the anchored positions.
//
// Two ways through a batch:
//   scan_rows      one pass, a team of threads per row: eight (rows of up to 64 positions, four to
//                  a warp), a warp, or a thread block that keeps the next tile in flight
//   scan_blocks_*  for few long rows, and for packed rows of any lengths: all blocks compute what
//                  they do to a carry, a warp per row chains them, all blocks finish. Work is
//                  balanced whatever the lengths; inputs are read twice.
//
// A Problem has
//   Number, kScans (recurrences over the same positions), kHasLink, Args, static rows(args)
//   static anchor<kTeam>(args, row, thread), called by all threads of a team, and
//   Problem(args, row, anchor)
//   positions(), padding()                 how many it scans, how many elements are left to pad()
//   Loads with load(problem, position)     issues the loads of eight positions
//   prepare(loads, position)               takes them as numbers
//   has_link(), link_out(), link(x)        a value that positions with one hand to what follows in
//                                          the scan: V_{t+1} across holes
//   is_link_at(p), link_at(p)              the same for one position
//   aggregate(s), finish(carries)          Affine of the eight positions; results to memory
//   first_link(), first_carry(s)           what comes into the first block
//   pad(at), finish_row(link, carries)     elements outside; what comes out of the last block
#pragma once

#include "common/reduce.cuh"
#include "common/rows.cuh"

namespace fastrl::cuda {

constexpr int kBlockPositions = kWarp * kItems;  // of a warp
constexpr int kScanThreads = 256;

// What positions do to a carry that comes in: x + a * carry.
template <typename T>
struct Affine {
  T x = 0;
  T a = 1;

  __device__ __forceinline__ T operator()(T carry) const { return x + a * carry; }
  // This one first, then `next`.
  __device__ __forceinline__ Affine then(Affine next) const { return {next(x), next.a * a}; }
};

// What all threads before this one do, in a team of kWidth lanes; `total` is what all of them do.
template <int kWidth, typename T>
__device__ __forceinline__ Affine<T> exclusive_scan(Affine<T> mine, Affine<T>& total) {
  const int lane = static_cast<int>(threadIdx.x) % kWidth;
#pragma unroll
  for (int step = 1; step < kWidth; step *= 2) {
    const Affine<T> before = {__shfl_up_sync(kAllLanes, mine.x, step, kWidth),
                              __shfl_up_sync(kAllLanes, mine.a, step, kWidth)};
    if (lane >= step) mine = before.then(mine);
  }
  total = {__shfl_sync(kAllLanes, mine.x, kWidth - 1, kWidth),
           __shfl_sync(kAllLanes, mine.a, kWidth - 1, kWidth)};
  const Affine<T> before = {__shfl_up_sync(kAllLanes, mine.x, 1, kWidth),
                            __shfl_up_sync(kAllLanes, mine.a, 1, kWidth)};
  return lane == 0 ? Affine<T>{} : before;
}

// The links of a team of kWidth lanes, seen from one of them.
template <typename T>
struct Links {
  bool has_before, has_any;
  T before, last;  // from the nearest lane before this one; what the team hands on

  __device__ __forceinline__ T reaching(T outside) const { return has_before ? before : outside; }
  __device__ __forceinline__ T leaving(T outside) const { return has_any ? last : outside; }
};

template <int kWidth, typename T>
__device__ __forceinline__ Links<T> scan_links(bool has, T mine) {
  const unsigned lane = threadIdx.x % kWarp, base = lane - lane % kWidth;
  const unsigned team = kWidth == kWarp ? kAllLanes : ((1u << (kWidth % kWarp)) - 1) << base;
  const unsigned holders = __ballot_sync(kAllLanes, has) & team;
  const unsigned before = holders & ((1u << lane) - 1);
  const auto highest = [&](unsigned lanes) {
    return lanes == 0 ? static_cast<int>(lane) : 31 - __clz(static_cast<int>(lanes));
  };
  Links<T> links;
  links.has_before = before != 0;
  links.has_any = holders != 0;
  links.before = __shfl_sync(kAllLanes, mine, highest(before));
  links.last = __shfl_sync(kAllLanes, mine, highest(holders));
  return links;
}

// ---- one pass, a team per row
// ----------------------------------------------------------------------------------------

// What the warps of a thread block tell each other about a tile.
template <typename T, int kScans>
struct TileExchange {
  T link[kScanThreads / kWarp];
  int has_link[kScanThreads / kWarp];
  Affine<T> block[kScans][kScanThreads / kWarp];
};

template <typename Problem, int kTeam>
__global__ void __launch_bounds__(kScanThreads, 2)
    scan_rows(const __grid_constant__ typename Problem::Args args) {
  using T = typename Problem::Number;
  constexpr int kScans = Problem::kScans;
  constexpr int kWidth = kTeam < kWarp ? kTeam : kWarp;
  constexpr bool kWide = kTeam > kWarp;
  __shared__ TileExchange<T, kScans> exchange;

  const int thread = static_cast<int>(threadIdx.x) % kTeam;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t team = int64_t{blockIdx.x} * (kScanThreads / kTeam) + threadIdx.x / kTeam;
  const Rows& rows = Problem::rows(args);
  // Teams share warps: one without a row walks along with an empty one.
  const bool exists = team < rows.count;
  Row row(rows, exists ? team : 0);
  if (!exists) row.length = 0;
  const int64_t anchor = Problem::template anchor<kTeam>(args, row, thread);
  Problem problem(args, row, anchor);
  const int64_t positions = problem.positions();

  T link = problem.first_link();
  T carry[kScans];
#pragma unroll
  for (int s = 0; s < kScans; ++s) carry[s] = problem.first_carry(s);

  typename Problem::Loads loads;
  loads.load(problem, int64_t{thread} * kItems);
  // Rows of a team below a thread block have one tile: see launch_scan.
  for (int64_t begin = 0; kWide ? begin < positions : begin == 0; begin += kTeam * kItems) {
    problem.prepare(loads, begin + int64_t{thread} * kItems);
    if constexpr (kWide) {
      if (begin + kTeam * kItems < positions) {
        loads.load(problem, begin + kTeam * kItems + int64_t{thread} * kItems);
      }
    }
    if constexpr (Problem::kHasLink) {
      const Links<T> links = scan_links<kWidth>(problem.has_link(), problem.link_out());
      T outside = link;
      if constexpr (kWide) {
        if (threadIdx.x % kWarp == 0) {
          exchange.link[warp] = links.last;
          exchange.has_link[warp] = links.has_any;
        }
        __syncthreads();
#pragma unroll
        for (int w = 0; w < kScanThreads / kWarp; ++w) {
          if (w == warp) outside = link;
          if (exchange.has_link[w]) link = exchange.link[w];
        }
      } else {
        link = links.leaving(link);
      }
      problem.link(links.reaching(outside));
    }
    Affine<T> before[kScans], total[kScans];
#pragma unroll
    for (int s = 0; s < kScans; ++s) {
      before[s] = exclusive_scan<kWidth>(problem.aggregate(s), total[s]);
    }
    T own[kScans];
    if constexpr (kWide) {
      if (threadIdx.x % kWarp == 0) {
#pragma unroll
        for (int s = 0; s < kScans; ++s) exchange.block[s][warp] = total[s];
      }
      __syncthreads();
#pragma unroll
      for (int s = 0; s < kScans; ++s) {
        own[s] = carry[s];
#pragma unroll
        for (int w = 0; w < kScanThreads / kWarp; ++w) {
          if (w == warp) own[s] = carry[s];
          carry[s] = exchange.block[s][w](carry[s]);
        }
      }
    } else {
#pragma unroll
      for (int s = 0; s < kScans; ++s) {
        own[s] = carry[s];
        carry[s] = total[s](carry[s]);
      }
    }
#pragma unroll
    for (int s = 0; s < kScans; ++s) own[s] = before[s](own[s]);
    problem.finish(own);
    // With links their barrier keeps the next tile from writing what this one still reads.
    if constexpr (kWide && !Problem::kHasLink) __syncthreads();
  }
  if (!exists) return;
  for (int64_t at = int64_t{thread} * kItems; at < problem.padding(); at += kTeam * kItems) {
    problem.pad(at);
  }
  if (thread == 0) problem.finish_row(link, carry);
}

// ---- all blocks at once
// ----------------------------------------------------------------------------------------------

// Slots number the blocks of all rows without a look at the lengths: padded rows have as many as
// their width needs, and a packed row that starts at element e has them from e / 256 + row on,
// which leaves room for its length and never overlaps the next.
struct BlockSlots {
  static __host__ __device__ int64_t per_row(const Rows& rows) {
    return (rows.length + kBlockPositions - 1) / kBlockPositions;
  }
  static __host__ int64_t count(const Rows& rows) {
    return rows.packed() ? rows.tokens / kBlockPositions + rows.count : rows.count * per_row(rows);
  }
  static __device__ int64_t first(const Rows& rows, int64_t row) {
    if (!rows.packed()) return row * per_row(rows);
    return Row(rows, row).start / kBlockPositions + row;
  }
  static __device__ int64_t row_of(const Rows& rows, int64_t slot) {
    if (!rows.packed()) return slot / per_row(rows);
    int64_t low = 0, high = rows.count;  // first(low) <= slot < first(high)
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (first(rows, middle) <= slot ? low : high) = middle;
    }
    return low;
  }
};

// What the passes leave for each other: anchors and final links by row, the rest by slot.
template <typename T, int kScans>
struct BlockStates {
  int64_t* anchors = nullptr;
  T* last_links = nullptr;
  T* links = nullptr;
  Affine<T>* blocks[kScans] = {};
  T* carries[kScans] = {};
};

template <typename Problem>
using StatesOf = BlockStates<typename Problem::Number, Problem::kScans>;

// A thread block per row.
template <typename Problem>
__global__ void __launch_bounds__(kScanThreads)
    scan_blocks_anchor(const __grid_constant__ typename Problem::Args args,
                       StatesOf<Problem> states) {
  const Row row(Problem::rows(args), blockIdx.x);
  const int64_t anchor =
      Problem::template anchor<kScanThreads>(args, row, static_cast<int>(threadIdx.x));
  if (threadIdx.x == 0) states.anchors[blockIdx.x] = anchor;
}

// The link that comes into the block at position `begin`: from the nearest position before it that
// has one.
template <typename Problem>
__device__ typename Problem::Number search_link(const Problem& problem, int64_t begin) {
  // Nearly always the neighbour, which costs one look instead of a block of them.
  if (begin > 0 && problem.is_link_at(begin - 1)) return problem.link_at(begin - 1);
  for (int64_t end = begin; end > 0; end -= kBlockPositions) {
    // Lane 0 looks at the nearest eight positions, from near to far.
    const int64_t nearest = end - 1 - int64_t{threadIdx.x % kWarp} * kItems;
    int64_t found = -1;
#pragma unroll
    for (int i = kItems - 1; i >= 0; --i) {
      if (nearest - i >= 0 && problem.is_link_at(nearest - i)) found = nearest - i;
    }
    const unsigned finders = __ballot_sync(kAllLanes, found >= 0);
    if (finders != 0) {
      return problem.link_at(__shfl_sync(kAllLanes, found, __ffs(static_cast<int>(finders)) - 1));
    }
  }
  return problem.first_link();
}

// A warp per slot, twice: kFinish = false leaves what the block does to a carry, true writes the
// results.
template <typename Problem, bool kFinish>
__global__ void __launch_bounds__(kScanThreads, 1)
    scan_blocks(const __grid_constant__ typename Problem::Args args, StatesOf<Problem> states,
                int64_t num_slots) {
  using T = typename Problem::Number;
  const int64_t slot = int64_t{blockIdx.x} * (kScanThreads / kWarp) + threadIdx.x / kWarp;
  if (slot >= num_slots) return;
  const Rows& rows = Problem::rows(args);
  const int64_t index = BlockSlots::row_of(rows, slot);
  const Row row(rows, index);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t begin = (slot - BlockSlots::first(rows, index)) * kBlockPositions;
  Problem problem(args, row, states.anchors[index]);
  const int64_t padded = begin + int64_t{lane} * kItems;
  if (kFinish && padded < problem.padding()) problem.pad(padded);
  if (begin >= problem.positions()) return;

  typename Problem::Loads loads;
  loads.load(problem, begin + int64_t{lane} * kItems);
  problem.prepare(loads, begin + int64_t{lane} * kItems);
  if constexpr (Problem::kHasLink) {
    const T link = kFinish ? states.links[slot] : search_link(problem, begin);
    const Links<T> links = scan_links<kWarp>(problem.has_link(), problem.link_out());
    problem.link(links.reaching(link));
    if (!kFinish && lane == 0) {
      states.links[slot] = link;
      if (begin + kBlockPositions >= problem.positions()) {
        states.last_links[index] = links.leaving(link);
      }
    }
  }
  T carry[Problem::kScans];
#pragma unroll
  for (int s = 0; s < Problem::kScans; ++s) {
    Affine<T> total;
    const Affine<T> before = exclusive_scan<kWarp>(problem.aggregate(s), total);
    if constexpr (kFinish) {
      carry[s] = before(states.carries[s][slot]);
    } else {
      if (lane == 0) states.blocks[s][slot] = total;
    }
  }
  if constexpr (kFinish) problem.finish(carry);
}

// A warp per row.
template <typename Problem>
__global__ void __launch_bounds__(kScanThreads)
    scan_blocks_chain(const __grid_constant__ typename Problem::Args args,
                      StatesOf<Problem> states) {
  using T = typename Problem::Number;
  const int64_t index = int64_t{blockIdx.x} * (kScanThreads / kWarp) + threadIdx.x / kWarp;
  const Rows& rows = Problem::rows(args);
  if (index >= rows.count) return;
  const Row row(rows, index);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  Problem problem(args, row, states.anchors[index]);
  const int64_t first = BlockSlots::first(rows, index);
  const int64_t num_blocks = (problem.positions() + kBlockPositions - 1) / kBlockPositions;
  T carry[Problem::kScans];
#pragma unroll
  for (int s = 0; s < Problem::kScans; ++s) {
    carry[s] = problem.first_carry(s);
    for (int64_t begin = 0; begin < num_blocks; begin += kWarp) {
      const bool exists = begin + lane < num_blocks;
      const Affine<T> mine = exists ? states.blocks[s][first + begin + lane] : Affine<T>{};
      T own = 0;
#pragma unroll
      for (int i = 0; i < kWarp; ++i) {
        if (i == lane) own = carry[s];
        const Affine<T> block = {__shfl_sync(kAllLanes, mine.x, i),
                                 __shfl_sync(kAllLanes, mine.a, i)};
        carry[s] = begin + i < num_blocks ? block(carry[s]) : carry[s];
      }
      if (exists) states.carries[s][first + begin + lane] = own;
    }
  }
  if (lane == 0) {
    const T link =
        Problem::kHasLink && num_blocks > 0 ? states.last_links[index] : problem.first_link();
    problem.finish_row(link, carry);
  }
}

}  // namespace fastrl::cuda
