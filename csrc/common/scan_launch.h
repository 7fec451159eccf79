// Chooses how the scans of scan_rows.cuh go through a batch; no choice changes a bit of the result.
// For *_cuda.cu files.
#pragma once

#include <array>

#include "common/launch.h"
#include "common/scan_rows.cuh"

namespace fastrl::cuda {

// A thread block per row keeps a GPU busy from about two per multiprocessor on.
constexpr int64_t kManyRows = 256;
// Below this a row is over before three launches would be.
constexpr int64_t kShortRow = 4096;

template <typename Problem, int kTeam>
void launch_rows(Launcher& launch, const typename Problem::Args& args, int64_t rows) {
  constexpr int kTeams = kScanThreads / kTeam;
  launch(scan_rows<Problem, kTeam>, (rows + kTeams - 1) / kTeams, kScanThreads, args);
}

template <typename Problem>
void launch_blocks(Launcher& launch, const typename Problem::Args& args, const Rows& rows,
                   const Tensor& like) {
  using T = typename Problem::Number;
  constexpr int kScans = Problem::kScans;
  constexpr int kWarps = kScanThreads / kWarp;
  const int64_t slots = BlockSlots::count(rows);
  const ScalarType type = sizeof(T) == 8 ? ScalarType::Double : ScalarType::Float;
  Tensor anchors = new_tensor(like, std::array<int64_t, 1>{rows.count}, ScalarType::Long);
  Tensor numbers =
      new_tensor(like, std::array<int64_t, 1>{rows.count + slots * (1 + 3 * kScans)}, type);
  StatesOf<Problem> states;
  states.anchors = static_cast<int64_t*>(anchors.mutable_data_ptr());
  T* next = static_cast<T*>(numbers.mutable_data_ptr());
  const auto take = [&](int64_t count) {
    T* const taken = next;
    next += count;
    return taken;
  };
  states.last_links = take(rows.count);
  states.links = take(slots);
  for (int s = 0; s < kScans; ++s) {
    states.blocks[s] = reinterpret_cast<Affine<T>*>(take(2 * slots));
    states.carries[s] = take(slots);
  }
  const int64_t slot_blocks = (slots + kWarps - 1) / kWarps;
  launch(scan_blocks_anchor<Problem>, rows.count, kScanThreads, args, states);
  launch(scan_blocks<Problem, false>, slot_blocks, kScanThreads, args, states, slots);
  launch(scan_blocks_chain<Problem>, (rows.count + kWarps - 1) / kWarps, kScanThreads, args,
         states);
  launch(scan_blocks<Problem, true>, slot_blocks, kScanThreads, args, states, slots);
}

// `like` is any tensor on the device. Without kByRows everything goes block by block: one way
// through is enough for what is never the bulk of the work, and compiles in half the time.
template <typename Problem, bool kByRows>
void launch_scan(const typename Problem::Args& args, const Rows& rows, const Tensor& like) {
  if (rows.count == 0) return;
  Launcher launch(like);
  if constexpr (kByRows) {
    if (!rows.packed()) {
      if (rows.length <= 8 * kItems) return launch_rows<Problem, 8>(launch, args, rows.count);
      if (rows.length <= kBlockPositions) {
        return launch_rows<Problem, kWarp>(launch, args, rows.count);
      }
      if (rows.length <= kShortRow || rows.count >= kManyRows) {
        return launch_rows<Problem, kScanThreads>(launch, args, rows.count);
      }
    }
  }
  launch_blocks<Problem>(launch, args, rows, like);
}

}  // namespace fastrl::cuda
