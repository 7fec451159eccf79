// torch.ops.fastrl.group_advantages on CPU.
//
// Samples are put in the order of their groups by a counting sort, then each group is finished by
// itself: its members' scores are near each other, sums run in the order of the samples, and groups
// can be shared out among threads without changing a bit.
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "group_advantages/group_advantages_inputs.h"
#include "group_advantages/group_advantages_kernel.h"
#include "group_ids/first_seen.h"
#include "whiten/whiten_kernel.h"

namespace fastrl {
namespace {

using Doubles = std::vector<double>;

// Members of group g are order[starts[g]] .. order[starts[g+1]], ascending; an empty order is the
// identity.
struct Grouping {
  std::vector<int64_t> starts;
  std::vector<int64_t> order;

  int64_t num_groups() const { return static_cast<int64_t>(starts.size()) - 1; }
};

Grouping grouping_of(const int64_t* ids, int64_t count) {
  Grouping grouping;
  bool is_sorted = true;
  for (int64_t i = 1; i < count; ++i) is_sorted &= ids[i - 1] <= ids[i];
  if (is_sorted) {
    grouping.starts.push_back(0);
    for (int64_t i = 1; i < count; ++i) {
      if (ids[i] != ids[i - 1]) grouping.starts.push_back(i);
    }
    if (count > 0) grouping.starts.push_back(count);
    return grouping;
  }
  std::vector<int64_t> numbers(static_cast<size_t>(count));
  const int64_t num_groups = number_ints(ids, count, numbers.data());
  grouping.starts.assign(static_cast<size_t>(num_groups) + 1, 0);
  for (const int64_t g : numbers) ++grouping.starts[static_cast<size_t>(g) + 1];
  for (size_t g = 1; g < grouping.starts.size(); ++g) grouping.starts[g] += grouping.starts[g - 1];
  std::vector<int64_t> next(grouping.starts.begin(), grouping.starts.end() - 1);
  grouping.order.resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    int64_t& at = next[static_cast<size_t>(numbers[static_cast<size_t>(i)])];
    grouping.order[static_cast<size_t>(at++)] = i;
  }
  return grouping;
}

// What one objective needs; a NaN score is not scored.
struct Objective {
  const double* scores;   // [N]
  const double* lengths;  // [N], null unless the baseline is length_weighted
  double weight;
  double inverse_batch_std;
};

// The scored members of one group, side by side.
struct Members {
  std::vector<int64_t> index;
  Doubles scores;
  int64_t count = 0;

  explicit Members(int64_t largest)
      : index(static_cast<size_t>(largest)), scores(static_cast<size_t>(largest)) {}

  void gather(const Objective& objective, const int64_t* order, int64_t begin, int64_t end) {
    int64_t n = 0;
    for (int64_t m = begin; m < end; ++m) {
      const int64_t i = order == nullptr ? m : order[m];
      const double score = objective.scores[i];
      index[static_cast<size_t>(n)] = i;
      scores[static_cast<size_t>(n)] = score;
      n += !std::isnan(score);
    }
    count = n;
  }
};

GroupSums sums_of(const Members& members, const double* lengths) {
  GroupSums sums;
  const double* const scores = members.scores.data();
  const double origin = scores[0];
  double total = 0;
  for (int64_t m = 0; m < members.count; ++m) {
    const double offset = scores[m] - origin;
    total += offset;
    sums.all_equal &= offset == 0;  // inf - inf is not: infinite scores are never equal
  }
  sums.count = static_cast<double>(members.count);
  sums.origin = origin;
  sums.offset = total / sums.count;
  for (int64_t m = 0; m < members.count; ++m) {
    const double deviation = (scores[m] - origin) - sums.offset;
    sums.m2 += deviation * deviation;
  }
  for (int64_t m = 0; lengths != nullptr && m < members.count; ++m) {
    const double length = lengths[members.index[static_cast<size_t>(m)]];
    sums.length += length;
    if (length > 0) sums.length_offset += length * (scores[m] - origin);
  }
  return sums;
}

void add_advantages(const Objective& objective, const Grouping& grouping,
                    const GroupOptions& options, int64_t first, int64_t last, double* totals) {
  const int64_t* const starts = grouping.starts.data();
  int64_t largest = 0;
  for (int64_t g = first; g < last; ++g) {
    const int64_t size = starts[g + 1] - starts[g];
    largest = size > largest ? size : largest;
  }
  Members members(largest);
  const int64_t* const order = grouping.order.empty() ? nullptr : grouping.order.data();
  for (int64_t g = first; g < last; ++g) {
    members.gather(objective, order, starts[g], starts[g + 1]);
    const bool is_alone = members.count == 1;
    if (members.count == 0 || (is_alone && !options.singleton_raw)) continue;
    const GroupMap map = is_alone ? raw_map(options)
                                  : group_map(sums_of(members, objective.lengths), options,
                                              objective.inverse_batch_std);
    for (int64_t m = 0; m < members.count; ++m) {
      const auto at = static_cast<size_t>(m);
      totals[members.index[at]] += objective.weight * map(members.scores[at]);
    }
  }
}

double inverse_batch_std_of(const double* scores, int64_t count, const GroupOptions& options) {
  std::vector<uint8_t> is_scored(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) is_scored[static_cast<size_t>(i)] = !std::isnan(scores[i]);
  const Moments batch =
      moments_of(FloatView{scores, Kind::f64, 0}, MaskView{is_scored.data(), 1, 0xff, 0}, count);
  return inverse_std(batch.count, batch.m2, batch.m2 == 0, options.ddof, options.eps);
}

// One [N] array of scores per objective; NaN for samples that are not valid.
Doubles scores_of(const GroupInputs& in) {
  const int64_t count = in.count;
  Doubles scores(static_cast<size_t>(count * in.num_objectives));
  if (in.sums_tokens) {
    const auto kernel = FASTRL_DISPATCH(sum_tokens);
    torch::stable::parallel_for(
        0, count, row_grain(count, in.rewards.numel()),
        [&](int64_t first, int64_t last) { kernel(in.tokens, first, last, scores.data()); });
  } else {
    TokenRows objectives;
    objectives.rewards = in.objectives();
    objectives.length = in.num_objectives;
    FASTRL_DISPATCH(read_scores)(objectives, count, scores.data());
  }
  if (in.valid) {
    const MaskView view = mask_view(*in.valid);
    const TokenRows flags{FloatView{}, MaskView{view.data, view.width, view.significant, 1}, 1};
    Doubles is_valid(static_cast<size_t>(count));
    FASTRL_DISPATCH(count_tokens)(flags, 0, count, is_valid.data());
    for (size_t at = 0; at < scores.size(); ++at) {
      if (is_valid[at % static_cast<size_t>(count)] == 0) {
        scores[at] = std::numeric_limits<double>::quiet_NaN();
      }
    }
  }
  return scores;
}

Tensor group_advantages_cpu(const Tensor& rewards_in, const Tensor& groups_in,
                            const std::optional<Tensor>& valid_in,
                            const std::optional<Tensor>& weights_in,
                            const std::optional<Tensor>& mask_in, int64_t baseline, int64_t scale,
                            int64_t ddof, double eps, bool singleton_raw) {
  const GroupInputs in(rewards_in, groups_in, valid_in, weights_in, mask_in, baseline, scale, ddof,
                       eps, singleton_raw);
  const GroupOptions& options = in.options;
  const TokenRows& tokens = in.tokens;
  const int64_t count = in.count;
  const int64_t row_share = row_grain(count, count * tokens.length);

  const Doubles scores = scores_of(in);
  Doubles lengths;
  if (options.baseline == Baseline::length_weighted) {
    lengths.resize(static_cast<size_t>(count));
    const auto kernel = FASTRL_DISPATCH(count_tokens);
    torch::stable::parallel_for(0, count, row_share, [&](int64_t first, int64_t last) {
      kernel(tokens, first, last, lengths.data());
    });
  }

  const Grouping grouping =
      grouping_of(static_cast<const int64_t*>(in.groups.const_data_ptr()), count);
  Doubles totals(static_cast<size_t>(count), 0.0);
  const auto* const weight =
      in.weights ? static_cast<const double*>(in.weights->const_data_ptr()) : nullptr;
  for (int64_t k = 0; k < in.num_objectives; ++k) {
    Objective objective{scores.data() + k * count, lengths.empty() ? nullptr : lengths.data(),
                        weight == nullptr ? 1.0 : weight[k], 1.0};
    if (options.scale == Scale::batch_std) {
      objective.inverse_batch_std = inverse_batch_std_of(objective.scores, count, options);
    }
    const int64_t num_groups = grouping.num_groups();
    torch::stable::parallel_for(
        0, num_groups, row_grain(num_groups, count), [&](int64_t first, int64_t last) {
          add_advantages(objective, grouping, options, first, last, totals.data());
        });
  }

  const ScalarType type = compute_type(kind_of(in.rewards, "rewards"));
  const bool to_double = type == ScalarType::Double;
  if (in.mask) {
    Tensor out = new_output(in.rewards, in.mask->sizes(), type);
    void* const data = out.mutable_data_ptr();
    const auto kernel = FASTRL_DISPATCH(spread_rows);
    torch::stable::parallel_for(0, count, row_share, [&](int64_t first, int64_t last) {
      kernel(tokens, first, last, totals.data(), to_double, data);
    });
    return out;
  }
  Tensor out = new_tensor(in.rewards, std::array<int64_t, 1>{count}, type);
  void* const data = out.mutable_data_ptr();
  for (int64_t i = 0; i < count; ++i) {
    const double total = totals[static_cast<size_t>(i)];
    if (to_double) {
      static_cast<double*>(data)[i] = total;
    } else {
      static_cast<float*>(data)[i] = static_cast<float>(total);
    }
  }
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fastrl, CPU, m) {
  m.impl("group_advantages", TORCH_BOX(&group_advantages_cpu));
}

}  // namespace fastrl
