// Reads offsets of groups of k as an emitted kernel does, on the threads of the host, and walks the tiles of all D: each
// has the k tiles of its group, from where this begins on, or one of zeros. The including file has those parts.
#include <pthread.h>

static pthread_barrier_t together;
static int lanes[32];

void __syncthreads() { pthread_barrier_wait(&together); }

int __shfl_up_sync(uint32_t, int value, int apart) {
  lanes[threadIdx.x] = value;
  pthread_barrier_wait(&together);
  const int found = lanes[threadIdx.x < apart ? threadIdx.x : threadIdx.x - apart];
  pthread_barrier_wait(&together);
  return found;
}

static Parameters given;
static GroupTable table;

static void* thread(void* number) {
  threadIdx.x = int(reinterpret_cast<intptr_t>(number));
  blockDim.x = 32;
  table.fill(given);
  return nullptr;
}

static const char* broken() {
  const Parameters& p = given;
  const GroupedTiles tiles(p, table);
  const int past = (p.k + kTileK - 1) / kTileK * kTileK;
  std::vector<int> begins(p.batches), ends(p.batches), times(p.batches);
  for (int group = 0, end = 0; group < p.batches; ++group) {  // by plain words
    begins[group] = end;
    const int own = std::min(std::max(p.offsets[group], 0), p.k);
    end = std::max(end, kWhole ? std::min(past, (own + kTileK - 1) / kTileK * kTileK) : own);
    ends[group] = end;
  }
  for (int index = 0; index < tiles.count(); ++index) {
    for (int rank = 0; rank < kClusterM * kClusterN; ++rank) {
      const TileCoord at = tiles.at(index, rank);
      if (at.batch < 0 || at.batch >= p.batches) return "a tile is of no group";
      if (at.m < p.m && at.n < p.n) ++times[at.batch];
      const int begin = begins[at.batch], end = ends[at.batch];
      if (kWhole && begin == end) {
        if (at.k_tiles != 1 || at.k_begin < p.k) return "an empty group has k tiles that are not zeros";
      } else if (at.k_begin != begin || at.k_end != end ||
                 at.k_tiles != std::max(1, (end - begin + kTileK - 1) / kTileK)) {
        return "a tile has k tiles of another group";
      }
      if (kWhole && at.k_begin % kTileK) return "a k tile begins between two others";
    }
  }
  const int all = (p.m + kTileM - 1) / kTileM * ((p.n + kTileN - 1) / kTileN);
  for (int one : times)
    if (one != all) return "a tile of D is not computed once";
  return nullptr;
}

int main() {
  while (std::scanf("%d %d %d %d", &given.m, &given.n, &given.k, &given.batches) == 4) {
    std::vector<int> offsets(given.batches);
    for (int& one : offsets) std::scanf("%d", &one);
    given.offsets = offsets.data();
    pthread_t threads[32];
    pthread_barrier_init(&together, nullptr, 32);
    for (intptr_t i = 0; i < 32; ++i) pthread_create(&threads[i], nullptr, thread, reinterpret_cast<void*>(i));
    for (pthread_t one : threads) pthread_join(one, nullptr);
    if (const char* why = broken()) {
      std::printf("%d of k, %d groups: %s\n", given.k, given.batches, why);
      return 1;
    }
  }
}
