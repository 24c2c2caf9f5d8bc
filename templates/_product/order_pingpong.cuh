{# Where tiles differ in their k tiles, one that is stepped over is told how many. #}
// The two consumers take turns at the products. A barrier's parity tells one lap of the ring from the
// next but not from the one after: only once the other has waited for all of its stages may this
// consumer wait for its own. Named barrier 3 opens turn 0, 4 opens turn 1.
struct Order {
  int turn{{ "" if varied else ", k_tiles" }};

{% if varied %}
  // `k_tiles` are those of the first tile, which turn 0 has.
  __device__ __forceinline__ Order(int turn, int k_tiles, Position& position) : turn(turn) {
    if (turn == 1) pass(position, k_tiles);  // turn 0 begins
  }
{% else %}
  __device__ __forceinline__ Order(int turn, int k_tiles, Position& position) : turn(turn), k_tiles(k_tiles) {
    if (turn == 1) pass(position);  // turn 0 begins
  }
{% endif %}

  __device__ __forceinline__ void begin() const { cutlass::arch::NamedBarrier::sync(256, 3 + turn); }

  __device__ __forceinline__ void multiplied(int, int) const {}

  // Opens the other turn, and steps over the stages of its tile.
  __device__ __forceinline__ void pass(Position& position{{ ", int k_tiles" if varied }}) const {
    cutlass::arch::NamedBarrier::arrive(256, 4 - turn);
    position.stage += k_tiles;
    position.phase ^= position.stage / kStages % 2;
    position.stage %= kStages;
  }

  // The last pass opened a turn that has no tile: it must not be left pending.
  __device__ __forceinline__ void finish(int tiles) const {
    if (tiles % 2 == turn) begin();
  }
};
