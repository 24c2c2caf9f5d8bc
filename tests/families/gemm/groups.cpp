// Reads offsets as an emitted grouped GEMM does, on the threads of the host, and walks the tiles of all clusters: each
// row of a group comes up once for each column, with its group and where that ends. The including file has those parts.
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
  std::vector<int> begins(p.batches), ends(p.batches);
  for (int group = 0, end = 0; group < p.batches; ++group) {  // by plain words
    if (kMasked) {
      const int rows = p.m / p.batches;
      begins[group] = group * rows;
      ends[group] = begins[group] + std::min(std::max(p.offsets[group], 0), rows);
      continue;
    }
    begins[group] = end;
    end = std::max(end, std::min(p.offsets[group], p.m));
    ends[group] = end;
  }
  const int columns = (p.n + kTileN - 1) / kTileN;
  std::vector<int> times(size_t(p.m) * columns);
  const int count = tiles.count();
  for (int index = 0; index < count; ++index) {
    for (int rank = 0; rank < kClusterM * kClusterN; ++rank) {
      const TileCoord at = tiles.at(index, rank);
      if (at.batch < 0 || at.batch >= p.batches) return "a tile is of no group";
      if (at.m_end != ends[at.batch]) return "a tile does not know where its group ends";
      if (at.m < begins[at.batch] || (at.m - begins[at.batch]) % kTileM) return "a tile begins beside its group's";
      if (at.n % kTileN || at.n < 0) return "a tile begins beside the columns";
      if (at.n >= p.n) continue;
      for (int row = at.m; row < std::min(at.m + kTileM, at.m_end); ++row) ++times[size_t(row) * columns + at.n / kTileN];
    }
  }
  for (int group = 0; group < p.batches; ++group)
    for (int row = begins[group]; row < ends[group]; ++row)
      for (int column = 0; column < columns; ++column)
        if (times[size_t(row) * columns + column] != 1) return "a row of a group is not multiplied once";
  for (int group = 0; group <= p.batches; ++group)
    for (int row = group ? ends[group - 1] : 0; row < (group < p.batches ? begins[group] : p.m); ++row)
      for (int column = 0; column < columns; ++column)
        if (times[size_t(row) * columns + column]) return "a row of no group is multiplied";
  const int each = kTileM * kClusterM;
  const int rows = kMasked ? (p.m / p.batches + each - 1) / each * p.batches
                           : (p.m + each - 1) / each + std::min(p.batches, p.m) - 1;
  if (count > rows * ((p.n + kTileN * kClusterN - 1) / (kTileN * kClusterN))) return "there are more tiles than the host counts";
  return nullptr;
}

int main() {
  pthread_barrier_init(&together, nullptr, 32);
  while (std::scanf("%d %d %d", &given.m, &given.n, &given.batches) == 3) {
    std::vector<int> offsets(given.batches);
    for (int& one : offsets) std::scanf("%d", &one);
    given.offsets = offsets.data();
    pthread_t threads[32];
    for (intptr_t i = 0; i < 32; ++i) pthread_create(&threads[i], nullptr, thread, reinterpret_cast<void*>(i));
    for (pthread_t& one : threads) pthread_join(one, nullptr);
    if (const char* why = broken()) {
      std::printf("%d rows, %d columns, %d groups: %s\n", given.m, given.n, given.batches, why);
      return 1;
    }
  }
}
