// torch.ops.fastrl.group_advantages on CUDA. The host never waits: how many groups there are is
// known to the device only.
#include <algorithm>
#include <array>

#include "common/launch.h"
#include "group_advantages/group_advantages.cuh"
#include "group_advantages/group_advantages_inputs.h"

namespace fastrl::cuda {
namespace {

constexpr int64_t kMaxSamples = int64_t{1} << 30;  // slots of the table are 32-bit
constexpr int64_t kMaxFinishBlocks = 1024;

// Hands out parts of one allocation.
class Workspace {
 public:
  explicit Workspace(void* data) : at_(static_cast<char*>(data)) {}

  template <typename T>
  T* take(int64_t count) {
    T* const taken = reinterpret_cast<T*>(at_ + bytes_);
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 15) / 16 * 16;
    return taken;
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* at_;
  int64_t bytes_ = 0;
};

// Returns how many bytes it takes; without data nothing may be used.
int64_t lay_out(GroupCall& call, void* data) {
  Workspace space(data);
  const int64_t count = call.count, objectives = call.num_objectives;
  call.groups = space.take<Group>(count);
  call.large = space.take<Group>(count / kWarp + 1);
  call.cursor = space.take<unsigned long long>(1);
  call.num_large = space.take<int32_t>(1);
  call.scores = space.take<double>(objectives * count);
  call.totals = space.take<double>(count);
  if (call.options.baseline == Baseline::length_weighted) call.lengths = space.take<double>(count);
  if (call.options.scale == Scale::batch_std) {
    const int64_t chunks = (count + kBatchChunk - 1) / kBatchChunk;
    call.inverse_std = space.take<double>(objectives);
    call.moments = space.take<Moments>(objectives * chunks);
  }
  for (int32_t** const by_slot : {&call.table, &call.sizes, &call.starts}) {
    *by_slot = space.take<int32_t>(call.table_size);
  }
  for (int32_t** const by_sample : {&call.slots, &call.arrivals, &call.members}) {
    *by_sample = space.take<int32_t>(count);
  }
  return space.bytes();
}

void group_samples(Launcher& launch, const GroupCall& call) {
  const int64_t blocks = (call.count + kGroupThreads - 1) / kGroupThreads;
  const bool reads_rows = call.sums_tokens || call.lengths != nullptr;
  if (reads_rows) {
    const bool is_double = call.tokens.rewards.kind == Kind::f64;
    launch(is_double ? sum_rows<double> : sum_rows<float>, call.count, kRowThreads, call);
  }
  if (call.count <= kOneBlock) {
    launch(group_advantages_of_few, 1, kGroupThreads, call, reads_rows);
    return;
  }
  if (!reads_rows) launch(prepare_groups, blocks, kGroupThreads, call);
  launch(insert_samples, blocks, kGroupThreads, call);
  launch(reserve_groups, blocks, kGroupThreads, call);
  launch(scatter_samples, blocks, kGroupThreads, call);
  // Enough warps for groups of eight.
  const int64_t finish_blocks = (call.count + 8 * kGroupWarps - 1) / (8 * kGroupWarps);
  launch(finish_groups, std::min(finish_blocks, kMaxFinishBlocks), kGroupThreads, call);
}

Tensor group_advantages_cuda(const Tensor& rewards, const Tensor& groups,
                             const std::optional<Tensor>& valid,
                             const std::optional<Tensor>& weights,
                             const std::optional<Tensor>& mask, int64_t baseline, int64_t scale,
                             int64_t ddof, double eps, bool singleton_raw) {
  const GroupInputs in(rewards, groups, valid, weights, mask, baseline, scale, ddof, eps,
                       singleton_raw);
  STD_TORCH_CHECK(in.count <= kMaxSamples, "fastrl: too many samples");
  const ScalarType type = compute_type(kind_of(in.rewards, "rewards"));
  Tensor out = in.mask ? new_tensor(rewards, in.mask->sizes(), type)
                       : new_tensor(rewards, std::array<int64_t, 1>{in.count}, type);
  if (out.numel() == 0) return out;

  GroupCall call;
  call.count = in.count;
  call.num_objectives = in.num_objectives;
  call.options = in.options;
  call.ids = static_cast<const int64_t*>(in.groups.const_data_ptr());
  call.rewards = in.objectives();
  call.tokens = in.tokens;
  call.sums_tokens = in.sums_tokens;
  if (in.valid) call.valid = mask_view(*in.valid);
  if (in.weights) call.weights = static_cast<const double*>(in.weights->const_data_ptr());
  if (!in.mask) call.out = out.mutable_data_ptr();
  call.to_double = type == ScalarType::Double;
  for (call.table_size = 64; call.table_size < 2 * in.count;) call.table_size *= 2;
  GroupCall measured = call;
  Tensor space =
      new_tensor(rewards, std::array<int64_t, 1>{lay_out(measured, nullptr)}, ScalarType::Byte);
  lay_out(call, space.mutable_data_ptr());

  Launcher launch(rewards);
  group_samples(launch, call);
  if (in.mask) {
    const int64_t blocks = in.count * tiles_of_row(in.tokens.length);
    if (call.to_double) {
      launch(spread_advantages<double>, blocks, kRowThreads, in.tokens, call.totals,
             static_cast<double*>(out.mutable_data_ptr()));
    } else {
      launch(spread_advantages<float>, blocks, kRowThreads, in.tokens, call.totals,
             static_cast<float*>(out.mutable_data_ptr()));
    }
  }
  return out;
}

}  // namespace

FASTRL_CUDA_LIBRARY_IMPL(m) { m.impl("group_advantages", TORCH_BOX(&group_advantages_cuda)); }

}  // namespace fastrl::cuda
