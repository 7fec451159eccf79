// Masked mean and variance, and whitening by them, on the device.
//
// A thread block takes a chunk: it keeps the elements in registers, so that they are centred on the
// chunk's own mean in a second pass that reads no memory. All sums are in double, by fixed trees.
#pragma once

#include "common/reduce.cuh"
#include "whiten/whiten_args.h"

namespace fastrl::cuda {

constexpr int kWhitenThreads = 256;
constexpr int kWhitenWarps = kWhitenThreads / kWarp;
constexpr int kMomentsItems = static_cast<int>(kMomentsChunk) / (kWhitenThreads * kItems);

// The moments of a chunk, measured from its first valid element.
struct ChunkMoments {
  Moments moments;
  double origin;
};

template <typename T>
__global__ void __launch_bounds__(kWhitenThreads)
    moments_of_chunks(const __grid_constant__ FloatView x, const __grid_constant__ MaskView mask,
                      int64_t count, ChunkMoments* out) {
  __shared__ double sums[kWhitenWarps];
  __shared__ int counts[kWhitenWarps];
  __shared__ double shared_origin;
  const int64_t begin = blockIdx.x * kMomentsChunk;
  FloatItems<T> items[kMomentsItems];
  MaskItems masks[kMomentsItems];
#pragma unroll
  for (int k = 0; k < kMomentsItems; ++k) {
    const int64_t at = begin + (k * kWhitenThreads + static_cast<int>(threadIdx.x)) * kItems;
    const ItemRange range = ItemRange::within(at, 0, count);
    items[k].load(x, at, range);
    masks[k].load(mask, at, range);
  }
  double value[kMomentsItems][kItems];
  uint32_t bits[kMomentsItems];
  int num_valid = 0, first = static_cast<int>(kMomentsChunk);
#pragma unroll
  for (int k = 0; k < kMomentsItems; ++k) {
    const int offset = (k * kWhitenThreads + static_cast<int>(threadIdx.x)) * kItems;
    bits[k] = masks[k].bits(mask, ItemRange::within(begin + offset, 0, count));
    T numbers[kItems];
    items[k].numbers(x, numbers);
#pragma unroll
    for (int i = 0; i < kItems; ++i) value[k][i] = static_cast<double>(numbers[i]);
    num_valid += __popc(bits[k]);
    if (bits[k] != 0) {
      const int lowest = offset + __ffs(static_cast<int>(bits[k])) - 1;
      first = lowest < first ? lowest : first;
    }
  }
  num_valid = block_reduce<kWhitenThreads>(num_valid, Sum{}, counts);
  if (num_valid == 0) {
    if (threadIdx.x == 0) out[blockIdx.x] = ChunkMoments{};
    return;
  }
  first = block_reduce<kWhitenThreads>(first, Least{}, counts);
  if (threadIdx.x == 0) shared_origin = static_cast<double>(element<T>(x, begin + first));
  __syncthreads();
  const double origin = shared_origin;

  double sum = 0;
#pragma unroll
  for (int k = 0; k < kMomentsItems; ++k) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      value[k][i] -= origin;
      sum += (bits[k] >> i) & 1 ? value[k][i] : 0.0;
    }
  }
  const double n = num_valid, mean = block_reduce<kWhitenThreads>(sum, Sum{}, sums) / n;
  double squares = 0;
#pragma unroll
  for (int k = 0; k < kMomentsItems; ++k) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const double deviation = value[k][i] - mean;
      squares += (bits[k] >> i) & 1 ? deviation * deviation : 0.0;
    }
  }
  squares = block_reduce<kWhitenThreads>(squares, Sum{}, sums);
  if (threadIdx.x == 0) out[blockIdx.x] = {{n, mean, squares}, origin};
}

// One block: every thread merges neighbouring chunks in order, then the threads are merged in
// order. Means are measured from the origin of the first chunk meanwhile, so that they lose no
// digits.
static __global__ void __launch_bounds__(kWhitenThreads)
    merge_chunks(const ChunkMoments* chunks, int64_t count, double* out) {
  __shared__ Moments shared[kWhitenWarps];
  __shared__ int64_t firsts[kWhitenWarps];
  const int64_t per_thread = (count + kWhitenThreads - 1) / kWhitenThreads;
  const int64_t begin = static_cast<int>(threadIdx.x) * per_thread;
  const int64_t end = begin + per_thread < count ? begin + per_thread : count;
  int64_t first = begin;
  while (first < end && chunks[first].moments.count == 0) ++first;
  first = block_reduce<kWhitenThreads>(first < end ? first : count, Least{}, firsts);
  const double origin = first < count ? chunks[first].origin : 0;
  Moments total;
#pragma unroll 1
  for (int64_t i = begin; i < end; ++i) {
    Moments part = chunks[i].moments;
    part.mean += chunks[i].origin - origin;
    total = merged(total, part);
  }
  const auto merge_lanes = [&] {
#pragma unroll 1
    for (int step = 1; step < kWarp; step *= 2) {
      total = merged(total, Moments{__shfl_down_sync(kAllLanes, total.count, step),
                                    __shfl_down_sync(kAllLanes, total.mean, step),
                                    __shfl_down_sync(kAllLanes, total.m2, step)});
    }
  };
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  merge_lanes();
  if (threadIdx.x % kWarp == 0) shared[warp] = total;
  __syncthreads();
  if (warp > 0) return;
  total = threadIdx.x < kWhitenWarps ? shared[threadIdx.x] : Moments{};
  merge_lanes();
  if (threadIdx.x > 0) return;
  out[0] = total.count;
  out[1] = total.count > 0 ? total.mean + origin : 0;
  out[2] = total.m2;
}

struct WhitenCall {
  FloatView x;    // [count], dense
  MaskView mask;  // same; null data: every element is valid
  int64_t count = 0;
  const double* moments = nullptr;  // count, mean, m2
  int64_t ddof = 0;
  double eps = 0;
  EpsMode mode = EpsMode::rsqrt_add;
  bool shift_mean = true;
  void* out = nullptr;  // [count]
};

template <typename T>
__global__ void __launch_bounds__(kWhitenThreads)
    whiten_elements(const __grid_constant__ WhitenCall call) {
  __shared__ double shared_factor;
  const int64_t thread = int64_t{blockIdx.x} * kWhitenThreads + threadIdx.x;
  const int64_t at = thread * kItems;
  const ItemRange range = ItemRange::within(at, 0, call.count);
  FloatItems<T> items;
  MaskItems mask;
  items.load(call.x, at, range);
  mask.load(call.mask, at, range);
  // A square root and divisions in double: once for the block, while its loads are on the way.
  if (threadIdx.x == 0) {
    shared_factor =
        whitening_factor(call.moments[0], call.moments[2], call.ddof, call.eps, call.mode);
  }
  __syncthreads();
  const double factor = shared_factor, mean = call.moments[1];
  const double added = call.shift_mean ? 0 : mean;
  T x[kItems];
  items.numbers(call.x, x);
  const uint32_t bits = mask.bits(call.mask, range);
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const auto whitened = static_cast<T>((static_cast<double>(x[i]) - mean) * factor + added);
    x[i] = (bits >> i) & 1 ? whitened : T{0};
  }
  store_items(static_cast<T*>(call.out), at, range, x);
}

}  // namespace fastrl::cuda
