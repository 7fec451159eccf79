// Group advantages on the device.
//
// Samples are brought together by a hash table of their ids; atomics decide where a group lies and
// in which order its members arrive, but nothing that a result depends on. Each group is then put
// in the order of its samples and finished by itself: a warp takes a small group, a thread block a
// large one, and both add the same chunks of scored members by the same tree.
//
// The steps are functions that any number of threads can share out: one block runs a small batch in
// one launch, larger ones take a launch per step.
#pragma once

#include "common/reduce.cuh"
#include "group_advantages/group_advantages_args.h"
#include "group_advantages/group_core.h"
#include "whiten/whiten_args.h"

namespace fastrl::cuda {

constexpr int kGroupThreads = 512;
constexpr int kGroupWarps = kGroupThreads / kWarp;
constexpr int kGroupChunk = 512;       // scored members that are added by one tree
constexpr int64_t kOneBlock = 1024;    // samples up to which one block does everything
constexpr int64_t kBatchChunk = 1024;  // samples of the batch's moments that a warp takes

static_assert(kGroupThreads == kGroupChunk, "a block sorts a chunk and adds one in one step");
static_assert(kGroupWarps <= kWarp, "counts of all warps fit the lanes of one");

struct alignas(16) Group {
  int32_t start, size, slot;
};

struct GroupCall {
  int64_t count = 0;
  int64_t num_objectives = 1;
  GroupOptions options;
  const int64_t* ids = nullptr;
  FloatView
      rewards;  // of sample i, objective k at i * row_stride + k; not read if token rewards are
  TokenRows tokens;
  bool sums_tokens = false;
  MaskView valid;                   // [count]; null data: all of them
  const double* weights = nullptr;  // [objectives]; null: one objective of weight 1
  void* out = nullptr;              // [count]; null where advantages go to tokens
  bool to_double = false;

  // Workspaces.
  double* scores = nullptr;              // [objectives, count], NaN: not scored
  double* totals = nullptr;              // [count], advantages
  double* lengths = nullptr;             // [count], null unless the baseline is weighted by them
  double* inverse_std = nullptr;         // [objectives], of the batch, null unless it is the scale
  Moments* moments = nullptr;            // [objectives, chunks of the batch]
  Group* groups = nullptr;               // [count]
  Group* large = nullptr;                // those of more than a warp's members
  unsigned long long* cursor = nullptr;  // groups so far (high half) and members so far
  int32_t* num_large = nullptr;
  int32_t* table = nullptr;     // [table_size], a sample of the group, or -1
  int32_t* sizes = nullptr;     // [table_size], members
  int32_t* starts = nullptr;    // [table_size], first of them in `members`
  int32_t* slots = nullptr;     // [count], place of the sample's group in the table
  int32_t* arrivals = nullptr;  // [count], number of the sample in its group, in no order
  int32_t* members = nullptr;   // [count], samples by group
  int64_t table_size = 0;       // a power of two
};

// The threads that share a step.
struct Workers {
  int64_t block, num_blocks;

  __device__ __forceinline__ int64_t thread() const { return block * blockDim.x + threadIdx.x; }
  __device__ __forceinline__ int64_t num_threads() const { return num_blocks * blockDim.x; }
  __device__ __forceinline__ int64_t warp() const { return thread() / kWarp; }
  __device__ __forceinline__ int64_t num_warps() const { return num_threads() / kWarp; }
};
__device__ __forceinline__ Workers whole_grid() { return {blockIdx.x, gridDim.x}; }
__device__ __forceinline__ int lane_of_warp() { return static_cast<int>(threadIdx.x) % kWarp; }
__device__ __forceinline__ uint32_t lanes_below() { return (1u << lane_of_warp()) - 1; }

// ---- scores
// --------------------------------------------------------------------------------------

__device__ __forceinline__ double valid_or_nan(const GroupCall& call, int64_t sample,
                                               double score) {
  const bool valid = call.valid.data == nullptr || mask_element(call.valid, sample);
  return valid ? score : static_cast<double>(NAN);
}

__device__ __forceinline__ void store_advantage(const GroupCall& call, int64_t sample, double x) {
  if (call.out == nullptr) return;
  if (call.to_double) {
    static_cast<double*>(call.out)[sample] = x;
  } else {
    static_cast<float*>(call.out)[sample] = static_cast<float>(x);
  }
}

// An empty table, results of samples that nobody scores, and scores unless they are sums.
__device__ inline void prepare(const GroupCall& call, Workers workers) {
  const int64_t first = workers.thread(), step = workers.num_threads();
  if (first == 0) *call.cursor = 0;
  if (first == 0) *call.num_large = 0;
  for (int64_t slot = first; slot < call.table_size; slot += step) {
    call.table[slot] = -1;
    call.sizes[slot] = 0;
  }
  for (int64_t i = first; i < call.count; i += step) {
    call.totals[i] = 0;
    store_advantage(call, i, 0);
  }
  if (call.sums_tokens) return;
  for (int64_t k = 0; k < call.num_objectives; ++k) {
    for (int64_t i = first; i < call.count; i += step) {
      const int64_t at = i * call.rewards.row_stride + k;
      const double score = call.rewards.kind == Kind::f64
                               ? element<double>(call.rewards, at)
                               : static_cast<double>(element<float>(call.rewards, at));
      call.scores[k * call.count + i] = valid_or_nan(call, i, score);
    }
  }
}

constexpr int kRowThreads = 128;
constexpr int64_t kRowTile = kRowThreads * kItems;

// Sum of the valid token rewards of a row, and their number; a block takes a row. Tiles start at
// the first valid token, so that a row has the same sum whatever its padding.
template <typename T>
__global__ void __launch_bounds__(kRowThreads) sum_rows(const __grid_constant__ GroupCall call) {
  __shared__ int64_t counts[kRowThreads / kWarp];
  __shared__ double sums[kRowThreads / kWarp];
  prepare(call, whole_grid());
  const TokenRows& rows = call.tokens;
  const int64_t row = blockIdx.x, length = rows.length;
  const int64_t mask_at = row * rows.mask.row_stride, reward_at = row * rows.rewards.row_stride;
  const int64_t offset = static_cast<int>(threadIdx.x) * kItems;
  int64_t first = 0;
  for (; rows.mask.data != nullptr && first < length; first += kRowTile) {
    const ItemRange range = ItemRange::within(first + offset, 0, length);
    MaskItems mask;
    mask.load(rows.mask, mask_at + first + offset, range);
    const uint32_t bits = mask.bits(rows.mask, range);
    const int64_t found = bits == 0 ? length : first + offset + __ffs(static_cast<int>(bits)) - 1;
    const int64_t lowest = block_reduce<kRowThreads>(found, Least{}, counts);
    if (lowest == length) continue;
    first = lowest;
    break;
  }
  double sum = 0;
  int64_t count = 0;
  for (int64_t at = first + offset; at < length; at += kRowTile) {
    const ItemRange range = ItemRange::within(at, 0, length);
    FloatItems<T> items;
    MaskItems mask;
    if (call.sums_tokens) items.load(rows.rewards, reward_at + at, range);
    mask.load(rows.mask, mask_at + at, range);
    const uint32_t bits = mask.bits(rows.mask, range);
    count += __popc(bits);
    if (!call.sums_tokens) continue;
    T x[kItems];
    items.numbers(rows.rewards, x);
#pragma unroll
    for (int i = 0; i < kItems; ++i) sum += (bits >> i) & 1 ? static_cast<double>(x[i]) : 0.0;
  }
  sum = block_reduce<kRowThreads>(sum, Sum{}, sums);
  count = block_reduce<kRowThreads>(count, Sum{}, counts);
  if (threadIdx.x > 0) return;
  if (call.sums_tokens) call.scores[row] = valid_or_nan(call, row, sum);
  if (call.lengths != nullptr) call.lengths[row] = static_cast<double>(count);
}

// ---- moments of the batch
// ------------------------------------------------------------------------

__device__ __forceinline__ int64_t batch_chunks(const GroupCall& call) {
  return (call.count + kBatchChunk - 1) / kBatchChunk;
}

// A warp takes a chunk, measured from its first scored sample.
__device__ inline void batch_moments(const GroupCall& call, Workers workers) {
  const int64_t chunks = batch_chunks(call);
  for (int64_t task = workers.warp(); task < chunks * call.num_objectives;
       task += workers.num_warps()) {
    const double* const scores = call.scores + task / chunks * call.count;
    const int64_t begin = task % chunks * kBatchChunk;
    const int64_t end = begin + kBatchChunk < call.count ? begin + kBatchChunk : call.count;
    double origin = 0, sum = 0, squares = 0;
    int count = 0;
    for (int64_t at = begin; at < end; at += kWarp) {
      const int64_t i = at + lane_of_warp();
      const double score = i < end ? scores[i] : static_cast<double>(NAN);
      const uint32_t scored = __ballot_sync(kAllLanes, !isnan(score));
      if (count == 0 && scored != 0) {
        origin = __shfl_sync(kAllLanes, score, __ffs(static_cast<int>(scored)) - 1);
      }
      count += __popc(scored);
      sum += isnan(score) ? 0.0 : score - origin;
    }
    const double n = count, mean = count == 0 ? 0 : warp_reduce(sum, Sum{}) / n;
    for (int64_t i = begin + lane_of_warp(); i < end; i += kWarp) {
      const double deviation = (scores[i] - origin) - mean;
      squares += isnan(scores[i]) ? 0.0 : deviation * deviation;
    }
    squares = warp_reduce(squares, Sum{});
    if (lane_of_warp() == 0) call.moments[task] = {n, origin + mean, squares};
  }
}

// The warps of one block merge the chunks, an objective each.
__device__ inline void merge_batch_moments(const GroupCall& call) {
  const int64_t chunks = batch_chunks(call);
  for (int64_t k = static_cast<int>(threadIdx.x) / kWarp; k < call.num_objectives;
       k += kGroupWarps) {
    Moments total;
    for (int64_t chunk = lane_of_warp(); chunk < chunks; chunk += kWarp) {
      total = merged(total, call.moments[k * chunks + chunk]);
    }
    for (int step = 1; step < kWarp; step *= 2) {
      total = merged(total, {__shfl_down_sync(kAllLanes, total.count, step),
                             __shfl_down_sync(kAllLanes, total.mean, step),
                             __shfl_down_sync(kAllLanes, total.m2, step)});
    }
    if (lane_of_warp() != 0) continue;
    call.inverse_std[k] =
        inverse_std(total.count, total.m2, total.m2 == 0, call.options.ddof, call.options.eps);
  }
}

// ---- grouping
// ------------------------------------------------------------------------------------

// Every bit of the id reaches the low bits, which choose the slot.
__device__ __forceinline__ uint64_t hash_id(int64_t id) {
  auto x = static_cast<uint64_t>(id);
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93;
  x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93;
  return x ^ (x >> 32);
}

// The slot of every sample. Equal ids of a warp are counted together.
__device__ inline void insert(const GroupCall& call, Workers workers) {
  const uint64_t last_slot = static_cast<uint64_t>(call.table_size) - 1;
  const int lane = lane_of_warp();
  for (int64_t base = workers.warp() * kWarp; base < call.count; base += workers.num_threads()) {
    const int64_t i = base + lane;
    const uint32_t exist = __ballot_sync(kAllLanes, i < call.count);
    const int64_t id = i < call.count ? call.ids[i] : 0;
    const uint32_t peers = exist & __match_any_sync(kAllLanes, static_cast<unsigned long long>(id));
    const int leader = __ffs(static_cast<int>(peers)) - 1;
    int32_t slot = 0, before = 0;
    if (i < call.count && lane == leader) {
      const auto sample = static_cast<int32_t>(i);
      for (uint64_t at = hash_id(id);; ++at) {
        slot = static_cast<int32_t>(at & last_slot);
        const int32_t found = atomicCAS(&call.table[slot], -1, sample);
        if (found == -1 || call.ids[found] == id) break;
      }
      before = atomicAdd(&call.sizes[slot], __popc(peers));
    }
    slot = __shfl_sync(kAllLanes, slot, leader < 0 ? lane : leader);
    before = __shfl_sync(kAllLanes, before, leader < 0 ? lane : leader);
    if (i >= call.count) continue;
    call.slots[i] = slot;
    call.arrivals[i] = before + __popc(peers & lanes_below());
  }
}

// Room for the members of each group; whoever arrived first asks for it.
__device__ inline void reserve(const GroupCall& call, Workers workers) {
  for (int64_t i = workers.thread(); i < call.count; i += workers.num_threads()) {
    if (call.arrivals[i] != 0) continue;
    Group group;
    group.slot = call.slots[i];
    group.size = call.sizes[group.slot];
    const unsigned long long before =
        atomicAdd(call.cursor, (1ull << 32) + static_cast<unsigned long long>(group.size));
    group.start = static_cast<int32_t>(before & 0xffffffffu);
    call.starts[group.slot] = group.start;
    call.groups[before >> 32] = group;
    if (group.size > kWarp) call.large[atomicAdd(call.num_large, 1)] = group;
  }
}

__device__ inline void scatter(const GroupCall& call, Workers workers) {
  for (int64_t i = workers.thread(); i < call.count; i += workers.num_threads()) {
    call.members[call.starts[call.slots[i]] + call.arrivals[i]] = static_cast<int32_t>(i);
  }
}

// ---- groups
// --------------------------------------------------------------------------------------

// The warps of the block share the arrays for small groups, all of it serves a large one.
struct GroupScratch {
  double score[2 * kGroupChunk];   // scored members, the one of rank r at r % (2 chunks)
  int32_t index[2 * kGroupChunk];  // samples they are
  int32_t arrived[kGroupChunk];    // members in the order of their arrival
  int32_t sorted[kGroupChunk];     // and in that of the samples
  int32_t counts[kGroupWarps];
  double origin, offset, factor;
  int32_t has_map;
};

// A chunk of scored members by one warp; all its lanes hold the sums. Until the last chunk is in,
// `offset` is the sum of offsets.
__device__ inline void add_offsets(GroupSums& sums, const double* score, const int32_t* index,
                                   int count, const double* lengths) {
  if (sums.count == 0) sums.origin = score[0];
  double offsets = 0, length = 0, length_offset = 0;
  bool equal = true;
  for (int r = lane_of_warp(); r < count; r += kWarp) {
    const double offset = score[r] - sums.origin;
    offsets += offset;
    equal &= offset == 0;  // inf - inf is not: infinite scores are never equal
    if (lengths == nullptr) continue;
    const double weight = lengths[index[r]];
    length += weight;
    if (weight > 0) length_offset += weight * offset;
  }
  sums.count += count;
  sums.offset += warp_reduce(offsets, Sum{});
  sums.all_equal &= __all_sync(kAllLanes, equal) != 0;
  if (lengths == nullptr) return;
  sums.length += warp_reduce(length, Sum{});
  sums.length_offset += warp_reduce(length_offset, Sum{});
}

__device__ inline void add_squares(GroupSums& sums, const double* score, int count) {
  double squares = 0;
  for (int r = lane_of_warp(); r < count; r += kWarp) {
    const double deviation = (score[r] - sums.origin) - sums.offset;
    squares += deviation * deviation;
  }
  sums.m2 += warp_reduce(squares, Sum{});
}

// False: every member gets 0.
__device__ inline bool map_of(const GroupCall& call, const GroupSums& sums, int64_t objective,
                              GroupMap& map) {
  if (sums.count == 0 || (sums.count == 1 && !call.options.singleton_raw)) return false;
  const double batch = call.inverse_std == nullptr ? 1 : call.inverse_std[objective];
  map = sums.count == 1 ? raw_map(call.options) : group_map(sums, call.options, batch);
  return true;
}

__device__ __forceinline__ void add_advantage(const GroupCall& call, int64_t objective,
                                              int32_t sample, double advantage) {
  const double weight = call.weights == nullptr ? 1 : call.weights[objective];
  const double total = call.totals[sample] + weight * advantage;
  call.totals[sample] = total;
  store_advantage(call, sample, total);
}

__device__ inline void finish_small_groups(const GroupCall& call, Workers workers,
                                           GroupScratch& scratch) {
  const int lane = lane_of_warp(), own = static_cast<int>(threadIdx.x) / kWarp * kWarp;
  double* const score = scratch.score + own;
  int32_t* const index = scratch.index + own;
  int32_t* const sorted = scratch.sorted + own;
  const auto num_groups = static_cast<int64_t>(*call.cursor >> 32);
  for (int64_t g = workers.warp(); g < num_groups; g += workers.num_warps()) {
    const Group group = call.groups[g];
    if (group.size > kWarp) continue;
    const bool exists = lane < group.size;
    int32_t sample = exists ? call.members[group.start + lane] : -1;
    int rank = 0;
    for (int j = 0; j < group.size; ++j) rank += __shfl_sync(kAllLanes, sample, j) < sample;
    if (exists) sorted[rank] = sample;
    __syncwarp();
    if (exists) sample = sorted[lane];
    for (int64_t k = 0; k < call.num_objectives; ++k) {
      const double own_score =
          exists ? call.scores[k * call.count + sample] : static_cast<double>(NAN);
      const uint32_t scored = __ballot_sync(kAllLanes, !isnan(own_score));
      if (!isnan(own_score)) {
        score[__popc(scored & lanes_below())] = own_score;
        index[__popc(scored & lanes_below())] = sample;
      }
      __syncwarp();
      GroupSums sums;
      if (scored != 0) {
        add_offsets(sums, score, index, __popc(scored), call.lengths);
        sums.offset /= sums.count;
        add_squares(sums, score, __popc(scored));
      }
      GroupMap map;
      if (map_of(call, sums, k, map) && !isnan(own_score)) {
        add_advantage(call, k, sample, map(own_score));
      }
      __syncwarp();
    }
  }
}

// Calls visit(score, index, n) in the first warp for each chunk of scored members in order;
// candidate(j, index, score) says whether candidate j < count is one of them.
template <typename Candidate, typename Visit>
__device__ __forceinline__ void for_each_chunk(GroupScratch& scratch, int count,
                                               const Candidate& candidate, const Visit& visit) {
  const int lane = lane_of_warp(), warp = static_cast<int>(threadIdx.x) / kWarp;
  int found = 0, visited = 0;  // at most 2^30 samples
  const auto visit_next = [&](int n) {
    const int at = visited % (2 * kGroupChunk);
    if (warp == 0) visit(scratch.score + at, scratch.index + at, n);
    visited += n;
  };
  for (int base = 0; base < count; base += kGroupThreads) {
    const int j = base + static_cast<int>(threadIdx.x);
    int32_t index = 0;
    double score = 0;
    const bool scored = j < count && candidate(j, index, score);
    const uint32_t bits = __ballot_sync(kAllLanes, scored);
    if (lane == 0) scratch.counts[warp] = __popc(bits);
    __syncthreads();
    const int of_warp = lane < kGroupWarps ? scratch.counts[lane] : 0;
    const int before = warp_reduce(lane < warp ? of_warp : 0, Sum{});
    if (scored) {
      const int rank = found + before + __popc(bits & lanes_below());
      scratch.score[rank % (2 * kGroupChunk)] = score;
      scratch.index[rank % (2 * kGroupChunk)] = index;
    }
    found += warp_reduce(of_warp, Sum{});
    __syncthreads();
    if (found - visited >= kGroupChunk) visit_next(kGroupChunk);
  }
  if (found > visited) visit_next(found - visited);
}

// Up to a chunk of members are sorted by counting; of more, all samples of the batch are looked
// through in their order.
__device__ inline void finish_large_groups(const GroupCall& call, Workers workers,
                                           GroupScratch& scratch) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int64_t g = workers.block; g < *call.num_large; g += workers.num_blocks) {
    const Group group = call.large[g];
    const bool staged = group.size <= kGroupChunk;
    if (staged) {
      const int32_t sample = thread < group.size ? call.members[group.start + thread] : -1;
      if (thread < group.size) scratch.arrived[thread] = sample;
      __syncthreads();
      int rank = 0;
      for (int j = 0; j < group.size; ++j) rank += scratch.arrived[j] < sample;
      if (thread < group.size) scratch.sorted[rank] = sample;
      __syncthreads();
    }
    const int candidates = staged ? group.size : static_cast<int>(call.count);
    for (int64_t k = 0; k < call.num_objectives; ++k) {
      const double* const scores = call.scores + k * call.count;
      const auto candidate = [&](int j, int32_t& index, double& score) {
        index = staged ? scratch.sorted[j] : j;
        if (!staged && call.slots[j] != group.slot) return false;
        score = scores[index];
        return !isnan(score);
      };
      GroupSums sums;
      for_each_chunk(scratch, candidates, candidate,
                     [&](const double* score, const int32_t* index, int n) {
                       add_offsets(sums, score, index, n, call.lengths);
                     });
      if (sums.count > 0) sums.offset /= sums.count;
      for_each_chunk(
          scratch, candidates, candidate,
          [&](const double* score, const int32_t*, int n) { add_squares(sums, score, n); });
      if (thread == 0) {
        GroupMap map;
        scratch.has_map = map_of(call, sums, k, map);
        scratch.origin = map.origin;
        scratch.offset = map.offset;
        scratch.factor = map.factor;
      }
      __syncthreads();
      const GroupMap map{scratch.origin, scratch.offset, scratch.factor};
      for (int j = thread; scratch.has_map != 0 && j < candidates; j += kGroupThreads) {
        int32_t index;
        double score;
        if (candidate(j, index, score)) add_advantage(call, k, index, map(score));
      }
      __syncthreads();
    }
  }
}

__device__ inline void finish(const GroupCall& call, Workers workers, GroupScratch& scratch) {
  finish_small_groups(call, workers, scratch);
  __syncthreads();
  finish_large_groups(call, workers, scratch);
}

// ---- kernels
// -------------------------------------------------------------------------------------

static __global__ void __launch_bounds__(kGroupThreads, 1)
    prepare_groups(const __grid_constant__ GroupCall call) {
  prepare(call, whole_grid());
}

static __global__ void __launch_bounds__(kGroupThreads, 1)
    insert_samples(const __grid_constant__ GroupCall call) {
  insert(call, whole_grid());
  if (call.inverse_std != nullptr) batch_moments(call, whole_grid());
}

static __global__ void __launch_bounds__(kGroupThreads, 1)
    reserve_groups(const __grid_constant__ GroupCall call) {
  reserve(call, whole_grid());
  if (call.inverse_std != nullptr && blockIdx.x == 0) merge_batch_moments(call);
}

static __global__ void __launch_bounds__(kGroupThreads, 1)
    scatter_samples(const __grid_constant__ GroupCall call) {
  scatter(call, whole_grid());
}

static __global__ void __launch_bounds__(kGroupThreads, 1)
    finish_groups(const __grid_constant__ GroupCall call) {
  __shared__ GroupScratch scratch;
  finish(call, whole_grid(), scratch);
}

// All of it by one block; `prepared`: sum_rows has been here.
static __global__ void __launch_bounds__(kGroupThreads, 1)
    group_advantages_of_few(const __grid_constant__ GroupCall call, bool prepared) {
  __shared__ GroupScratch scratch;
  const Workers workers{0, 1};
  if (!prepared) prepare(call, workers);
  __syncthreads();
  insert(call, workers);
  if (call.inverse_std != nullptr) batch_moments(call, workers);
  __syncthreads();
  reserve(call, workers);
  if (call.inverse_std != nullptr) merge_batch_moments(call);
  __syncthreads();
  scatter(call, workers);
  __syncthreads();
  finish(call, workers, scratch);
}

FASTRL_HD int64_t tiles_of_row(int64_t length) {
  return (length + kItems - 1 + kRowTile - 1) / kRowTile;
}

// The advantage of a sample at its valid tokens; a block takes a tile of a row, counted from the
// last aligned address before the row.
template <typename T>
__global__ void __launch_bounds__(kRowThreads)
    spread_advantages(const __grid_constant__ TokenRows rows, const double* advantages, T* out) {
  const int64_t tiles = tiles_of_row(rows.length), row = blockIdx.x / tiles;
  T* const out_row = out + row * rows.length;
  const auto past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(out_row) / sizeof(T) % kItems);
  const int64_t first =
      blockIdx.x % tiles * kRowTile + static_cast<int>(threadIdx.x) * kItems - past;
  const ItemRange range = ItemRange::within(first, 0, rows.length);
  MaskItems mask;
  mask.load(rows.mask, row * rows.mask.row_stride + first, range);
  const uint32_t bits = mask.bits(rows.mask, range);
  const T value = static_cast<T>(advantages[row]);
  T x[kItems];
#pragma unroll
  for (int i = 0; i < kItems; ++i) x[i] = (bits >> i) & 1 ? value : T{0};
  store_items(out_row, first, range, x);
}

}  // namespace fastrl::cuda
