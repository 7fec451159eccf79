// Numbers keys 0, 1, 2, ... by first appearance.
//
// Open addressing with linear probing over (hash, number) slots. The table starts small and doubles
// with the keys it has seen, not with those it is asked for: a batch with few groups keeps it in
// the first-level cache.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace fastrl {

// Both halves of the 128-bit product: every bit of either factor reaches the low bits, which choose
// the slot.
inline uint64_t fold_multiply(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

constexpr uint64_t kHashSeed = 0x9e3779b97f4a7c15;  // 2^64 / golden ratio
constexpr uint64_t kHashOdd = 0xc2b2ae3d27d4eb4f;

inline uint64_t hash_int(int64_t key) {
  return fold_multiply(static_cast<uint64_t>(key) ^ kHashSeed, kHashOdd);
}

// Sixteen bytes at a time; the last, possibly overlapping, sixteen close it.
inline uint64_t hash_bytes(const void* data, int64_t size) {
  const auto* p = static_cast<const unsigned char*>(data);
  uint64_t hash = kHashSeed ^ static_cast<uint64_t>(size);
  uint64_t words[2] = {0, 0};
  const auto absorb = [&] {
    hash = fold_multiply(words[0] ^ hash, words[1] ^ kHashOdd ^ (hash >> 32));
  };
  for (int64_t at = 0; at + 16 < size; at += 16) {
    std::memcpy(words, p + at, 16);
    absorb();
  }
  if (size >= 16) {
    std::memcpy(words, p + size - 16, 16);
  } else {
    words[0] = words[1] = 0;
    std::memcpy(words, p, static_cast<size_t>(size));
  }
  absorb();
  return fold_multiply(hash, kHashSeed);
}

class FirstSeen {
 public:
  FirstSeen() : slots_(kInitialSlots), mask_(kInitialSlots - 1) {}

  int64_t size() const { return static_cast<int64_t>(firsts_.size()); }

  // The number of the key at `index`, a new one if no earlier key is the same. `same_as(j)`
  // compares it with the key at index j, and is asked only when the hashes are equal.
  template <typename SameAs>
  int64_t number(uint64_t hash, int64_t index, const SameAs& same_as) {
    for (uint64_t at = hash & mask_;; at = (at + 1) & mask_) {
      const Slot& slot = slots_[at];
      if (slot.number < 0) return insert(hash, index, at);
      if (slot.hash == hash && same_as(firsts_[static_cast<size_t>(slot.number)])) {
        return slot.number;
      }
    }
  }

 private:
  struct Slot {
    uint64_t hash = 0;
    int64_t number = -1;
  };
  static constexpr uint64_t kInitialSlots = 1024;

  int64_t insert(uint64_t hash, int64_t index, uint64_t at) {
    const int64_t number = size();
    firsts_.push_back(index);
    slots_[at] = Slot{hash, number};
    if (2 * firsts_.size() > slots_.size()) grow();
    return number;
  }

  void grow() {
    std::vector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    mask_ = slots_.size() - 1;
    for (const Slot& slot : old) {
      if (slot.number < 0) continue;
      uint64_t at = slot.hash & mask_;
      while (slots_[at].number >= 0) at = (at + 1) & mask_;
      slots_[at] = slot;
    }
  }

  std::vector<Slot> slots_;
  uint64_t mask_;
  std::vector<int64_t> firsts_;  // number -> index of its first key
};

// Numbers of int64 keys; returns how many there are. Keys of a narrow range index a plain array
// instead of the table.
inline int64_t number_ints(const int64_t* keys, int64_t count, int64_t* numbers) {
  if (count == 0) return 0;
  int64_t low = keys[0], high = keys[0];
  for (int64_t i = 1; i < count; ++i) {
    low = keys[i] < low ? keys[i] : low;
    high = keys[i] > high ? keys[i] : high;
  }
  const uint64_t span = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  if (span < 4 * static_cast<uint64_t>(count)) {
    std::vector<int64_t> known(span + 1, -1);
    int64_t next = 0;
    for (int64_t i = 0; i < count; ++i) {
      int64_t& number = known[static_cast<uint64_t>(keys[i]) - static_cast<uint64_t>(low)];
      if (number < 0) number = next++;
      numbers[i] = number;
    }
    return next;
  }
  FirstSeen seen;
  for (int64_t i = 0; i < count; ++i) {
    numbers[i] = seen.number(hash_int(keys[i]), i, [&](int64_t j) { return keys[j] == keys[i]; });
  }
  return seen.size();
}

}  // namespace fastrl
