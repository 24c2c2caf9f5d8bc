// Multiplies dp^T = v do^T as the emitted text does, with v partly in registers: one thread after the other,
// over shared memory that holds what TMA put there. The including file holds constants and Held, as they were
// rendered, and what reads descriptors; here are ldmatrix and wgmma with A in registers.
static Held held[kConsumers * 128];  // of every thread of the consumers
static std::vector<uint32_t> given[kConsumers * 128];  // addresses that it gave to ldmatrix, call by call
static int thread() { return threadIdx.x - 128; }
void ldmatrix(uint32_t address) { given[thread()].push_back(address); }

// Lane l gets, of matrix i, the pair l % 4 of the row whose address lane 8 i + l / 4 gave.
static void complete_loads() {
  for (int t = 0; t < kConsumers * 128; ++t)
    for (size_t call = 0; call < given[t].size(); ++call)
      for (int i = 0; i < 4; ++i) {
        const int address = given[t / 32 * 32 + i * 8 + t % 32 / 4][call] + t % 4 * 4;
        held[t].rows[call][i] = uint16_t(element(address)) | uint32_t(uint16_t(element(address + 2))) << 16;
      }
}

// Register i of a lane has the pair l % 4 of 8 columns: of row l / 4, the row 8 below, then the next 8 columns.
static int in_registers(const uint32_t (&a)[4], int row, int k) {
  const int step = int(&a - held[thread()].rows), lane = row % 8 * 4 + k % 8 / 2;
  const uint32_t pair = held[thread() / 32 * 32 + lane].rows[step][row / 8 + k / 8 * 2];
  return int16_t(pair >> 16 * (k % 2));
}
template <int n> void multiply_held(const uint32_t (&a)[4], uint64_t b, float* d, bool add) {
  for (int j = 0; j < n / 2; ++j) {
    const int row = threadIdx.x % 32 / 4 + j / 2 % 2 * 8, column = j / 4 * 8 + threadIdx.x % 4 * 2 + j % 2;
    if (!add) d[j] = 0;
    for (int k = 0; k < 16; ++k) d[j] += in_registers(a, row, k) * operand(b, true, column, k);
  }
}

int main() {
  SharedStorage& shared = *reinterpret_cast<SharedStorage*>(memory);
  const Position at{kStages - 1, 0};
  const Matrix v = random_matrix(kKvTile, kDim), d_o = random_matrix(kQTile, kDim);
  load(shared.v, v, 0, 0, kKvRows, kDim);
  load(shared.d_o[at.stage], d_o, 0, 0, kQTile, kDim);
  const Parameters parameters{};
  const Work work{ {}, 0, 0, 0, 0, 1, 0};
  for (int phase = 0; phase < 2; ++phase) {
    for (threadIdx.x = 128; threadIdx.x < 128 + kConsumers * 128; ++threadIdx.x) {
      const Consumer c = made(parameters, shared, work, thread() / 128);
      if (phase == 0) {
        held[thread()].take(c);
        continue;
      }
      float dp[kScores];
      held[thread()].multiply(c, dp, c.staged_do(at));
      for (int j = 0; j < kScores; ++j) {
        const int row = c.column + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + j / 2 % 2 * 8;
        const int column = j / 4 * 8 + threadIdx.x % 4 * 2 + j % 2;
        int wanted = 0;
        for (int i = 0; i < kDim; ++i) wanted += v[row][i] * d_o[column][i];
        EXPECT(dp[j], wanted, "row %d of v, row %d of do", row, column);
      }
    }
    if (phase == 0) complete_loads();
  }
  return 0;
}
