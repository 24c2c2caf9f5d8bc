// Who finishes which fragments of a tile, and where the others leave their parts of them: what an emitted
// kernel computes of it, on the host. The including file has those parts, and the kernel's constants.
#include <cstdio>
#include <set>

int main() {
  static SharedStorage shared;
  auto* const buffer = reinterpret_cast<Fragment*>(shared.shared_sums);
  for (int rows = 0; rows < kSharing; ++rows)
    for (int warp = 0; warp < 4; ++warp)
      for (int fragment = 0; fragment < kAll; ++fragment) {
        int finished = 0;
        for (int rank = 0; rank < kSplit; ++rank)
          for (int share = 0; share < kShares; ++share) {
            threadIdx.x = (rows * kShares + share) * 128 + warp * 32;
            finished += SharedSums(rank, rows, share).finishes(fragment);
          }
        if (finished != 1) return std::puts("a fragment is not finished once"), 1;
      }
  // In each block, every part that a finisher reads has a place of its own, and who leaves it knows it.
  for (int rank = 0; rank < kSplit; ++rank) {
    std::set<const void*> taken;
    int left = 0;
    for (int rows = 0; rows < kSharing; ++rows)
      for (int thread = 0; thread < 128; ++thread)
        for (int fragment = 0; fragment < kAll; ++fragment)
          for (int share = 0; share < kShares; ++share) {
            threadIdx.x = (rows * kShares + share) * 128 + thread;
            const SharedSums finisher(rank, rows, share);
            if (!finisher.finishes(fragment)) continue;
            for (int source = 0; source < SharedSums::kSources; ++source) {
              const auto* place = finisher.place(buffer, finisher.mine(), source, fragment);
              if (place < buffer || (place + 1 - buffer) * 16 > long(sizeof(shared.shared_sums)))
                return std::puts("a place is outside"), 1;
              if (source == finisher.mine()) continue;
              if (!taken.insert(place).second) return std::puts("two parts have one place"), 1;
              threadIdx.x = (rows * kShares + source % kShares) * 128 + thread;
              const SharedSums other(source / kShares, rows, source % kShares);
              if (other.place(buffer, other.owner(fragment), other.mine(), fragment) != place)
                return std::puts("a part is left where nobody reads it"), 1;
              threadIdx.x = (rows * kShares + share) * 128 + thread;
              ++left;
            }
          }
    if (left * 16 != SharedSums::kBytes) return std::puts("a block waits for other bytes than are left"), 1;
  }
}
