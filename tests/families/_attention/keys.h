// Masks for the programs of both passes' ranges: of keys, or of pairs, of which all rows are alike here.
struct Mask {
  std::vector<uint8_t> memory;
  std::vector<int4> found;
  const uint8_t* shown;
  int64_t batch_step, head_step;

  // Of `batches` sequences and `heads`, or one for all of either; the kernel that is run before has looked at it.
  Mask(Parameters& p, int batches, int heads, int columns) {
    const int pitch = (columns + 15) / 16 * 16;
    if (random_below(2)) batches = 1;
    if (random_below(2)) heads = 1;
    memory.resize(size_t(batches) * heads * pitch + 32);
    uint8_t* first = memory.data() + (16 - reinterpret_cast<uintptr_t>(memory.data()) % 16) % 16;
    for (int row = 0; row < batches * heads; ++row) draw(first + row * pitch, columns);
    shown = first, head_step = heads > 1 ? pitch : 0, batch_step = batches > 1 ? heads * pitch : 0;
    p.shown = shown, p.shown_batch = batch_step, p.shown_head = head_step;
    p.shown_row = random_below(4) == 0 ? pitch : 0;
    p.keys_columns = columns, p.keys_batch = batches > 1 ? heads : 0, p.keys_head = heads > 1;
    found.resize(batches * heads);
    p.keys = found.data();
    threadIdx.x = 0;
    for (int row = 0; row < batches * heads && p.shown_row == 0; ++row) find_keys(p, row);
  }

  // Anywhere, or beside where a tile begins.
  static int place(int columns) {
    if (random_below(3) == 0) return random_below(columns + 1);
    return std::max(0, std::min(columns, random_below(columns / kKvTile + 1) * kKvTile + random_below(3) - 1));
  }

  static void draw(uint8_t* row, int columns) {
    const int kind = random_below(6), ends[2] = {place(columns), place(columns)};
    const int begin = kind < 3 ? 0 : std::min(ends[0], ends[1]);
    const int end = kind == 0 ? 0 : kind == 1 || kind == 3 ? columns : std::max(ends[0], ends[1]);
    for (int c = begin; c < end; ++c) row[c] = kind == 5 && random_below(5) == 0 ? 0 : 1 + random_below(255);
  }

  const uint8_t* row(int batch, int head) const { return shown + batch * batch_step + head * head_step; }
};
