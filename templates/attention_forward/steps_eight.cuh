// Steps of the loop over kv tiles: the weights of a tile are multiplied with its v, and behind that the scores of the
// next one, under which {{ "the product is added" if operation.promoted else "nothing waits" }}. Another warpgroup's products run under the softmax.
struct Steps {
  // Scores that are there become weights.
  static __device__ __forceinline__ void weigh(Consumer& c, float (&scores)[kScores], float (&{{ "" if operation.promoted else "output" }})[kOutputs],
                                               Weights& weights, Rows& rows, int n, bool masked) {
{% if capped or operation.scores == "int8" %}
    c.scaling.cap(scores);
{% endif %}
    if (masked) {{ hide }};
    softmax(scores, rows, c.scaling);
    pack(weights, scores);
{% if not operation.promoted %}
    rescale(output, rows);
{% endif %}
  }

  // The scores of the first tile.
  static __device__ __forceinline__ void first(Consumer& c, float (&scores)[kScores], int n) {
{% if operation.scales == "blocks" %}
    c.scaling.read(c.p, n);
{% endif %}
    cute::warpgroup_wait<0>();
    fence(scores);
    c.release_operands({{ "n" if layout.q_stages == 1 }});
  }

  // Tile n's weights and their product with v, and the scores of the tile before it, which is the next one.
  template <bool kMasked>
  static __device__ __forceinline__ void next(Consumer& c, float (&scores)[kScores], float (&output)[kOutputs],
                                              {{ "float (&product)[kOutputs], " if operation.promoted }}Weights& weights, Rows& rows, int n) {
    weigh(c, scores, {{ product }}, weights, rows, n, kMasked);
    const Position at = c.position;
    c.position.advance();
    c.shared.v_full[at.stage].wait(at.phase);
    c.shared.k_full[c.position.stage].wait(c.position.phase);
{% if operation.scales == "blocks" %}
    c.scaling.read(c.p, n - 1);
{% endif %}
{% if schedule.pingpong %}
    c.turns.begin();
{% endif %}
    multiply_output({{ product }}, weights, c.staged_v(at.stage));
    multiply_scores(scores, c.q, c.staged_k());
{% if schedule.pingpong %}
    c.turns.pass();
{% endif %}
    cute::warpgroup_wait<1>();
    fence({{ product }});
    release(c.shared.v_empty[at.stage]);
{% if operation.promoted %}
    add(output, product, rows);
{% endif %}
    cute::warpgroup_wait<0>();
    fence(scores);
    c.release_operands({{ "n - 1" if layout.q_stages == 1 }});
  }

  static __device__ __forceinline__ void last(Consumer& c, float (&{{ product }})[kOutputs], Weights& weights) {
    const Position at = c.position;
    c.position.advance();
    c.shared.v_full[at.stage].wait(at.phase);
    multiply_output({{ product }}, weights, c.staged_v(at.stage));
  }
};
