"""Writes variants of steps_serial.cuh whose dq follows a step later: see the commit."""
import os,sys
base='/work/main/templates'
rd=lambda p: open(f'{base}/{p}').read()
def sub(t,*prs):
    for a,b in prs:
        assert a in t,a
        t=t.replace(a,b)
    return t
T='attention_backward.cu.jinja'
t=rd(T)
i=t.index("// p = exp2(exponent s - lse)")
LEAN='''// The two values of a pair.
__device__ __forceinline__ float2 unpair(uint32_t pair) {
  float2 two;
  asm("{\\n.reg .b16 low, high;\\nmov.b32 { low, high }, %2;\\ncvt.f32.{{ "bf16" if packed_type == "bf16x2" else "f16" }} %0, low;\\ncvt.f32.{{ "bf16" if packed_type == "bf16x2" else "f16" }} %1, high;\\n}" : "=f"(two.x), "=f"(two.y) : "r"(pair));
  return two;
}
__device__ __forceinline__ void weigh_lean(const Consumer& c, Weights& weights, float (&scores)[kScores], Step step, Position at) {
  if (partial(c.p, c.work.sequence, step.row, c.column)) mask(scores, c.p, c.work.sequence, step.row, c.column);
  CUTE_UNROLL
  for (int i = 0; i < kScores / 4; ++i) {
    const float2 lse = statistics(c.shared.statistics[at.stage][0], i);
    CUTE_UNROLL
    for (int j = 0; j < 4; j += 2)
      weights[i / 2][i % 2 * 2 + j / 2] = pair(exp2(scores[4 * i + j] * c.scaling.exponent - lse.x), exp2(scores[4 * i + j + 1] * c.scaling.exponent - lse.y));
  }
}
__device__ __forceinline__ void differentiate_lean(const Consumer& c, Weights& ds, float (&dp)[kScores], const Weights& weights, Position at) {
  CUTE_UNROLL
  for (int i = 0; i < kScores / 4; ++i) {
    const float2 delta = statistics(c.shared.statistics[at.stage][1], i);
    CUTE_UNROLL
    for (int j = 0; j < 2; ++j) {
      const float2 p = unpair(weights[i / 2][i % 2 * 2 + j]);
      ds[i / 2][i % 2 * 2 + j] = pair(p.x * (dp[4 * i + 2 * j] - delta.x), p.y * (dp[4 * i + 2 * j + 1] - delta.y));
    }
  }
}

'''
t=t[:i]+LEAN+t[i:]
HEAD='''struct Steps {
  Step before;  // whose dq is to come
  Position stage_before;
  bool any = false;
  __device__ __forceinline__ void begin(const Consumer&, Position at) { before = {0, 0, 1}; stage_before = at; }
  __device__ __forceinline__ void next(const Consumer& c, float (&dk)[kGradients], float (&dv)[kGradients], Step step,
                                       Position at, bool) {
    float dq[kQueries];
    Weights weights, ds;
'''
TAIL='''    multiply_gradient(dk, ds, c.staged_q(at) + c.columns<kQTile>());
    %s
    before = step;
    stage_before = at;
    any = true;
  }

  __device__ __forceinline__ void end(const Consumer& c, float (&dk)[kGradients]) {
    float dq[kQueries];
    meet();
    multiply_query(dq, c.staged_ds(before), c.k + c.columns<kKvTile>(), c.consumer);
    cute::warpgroup_wait<0>();
    fence(dk);
    fence(dq);
    accumulate(c, dq, before);
  }
};
'''
RELQ="release(c.shared.q_empty[stage_before.stage]);"
def body(lean,flight):
    s=HEAD
    sc="      " if lean else "    "
    s+=("    {\n" if lean else "    float dp[kScores];\n")
    s+=sc+"float scores[kScores];\n"+sc+"c.shared.q_full[at.stage].wait(at.phase);\n"+sc+"multiply_scores(scores, c.k + c.own, c.staged_q(at));\n"+sc+"meet();\n"+sc+"multiply_query(dq, c.staged_ds(before), c.k + c.columns<kKvTile>(), c.consumer);\n"+sc+"cute::warpgroup_wait<1>();\n"+sc+"fence(scores);\n"
    if flight: s+=sc+"fence(dk);\n"+sc+"if (any) "+RELQ+"\n"
    s+=sc+("weigh_lean(c, weights, scores, step, at);\n    }\n" if lean else "weigh(c, weights, scores, step, at);\n")
    s+="    c.shared.do_full[at.stage].wait(at.phase);\n    cute::warpgroup_wait<0>();\n    fence(dq);\n"
    if lean: s+="    float dp[kScores];\n    multiply_scores(dp, c.v + c.own, c.staged_do(at));\n    multiply_gradient(dv, weights, c.staged_do(at) + c.columns<kQTile>());\n    if (any) accumulate(c, dq, before);\n    cute::warpgroup_wait<1>();\n    fence(dp);\n    differentiate_lean(c, ds, dp, weights, at);\n"
    else: s+="    if (any) accumulate(c, dq, before);\n    multiply_scores(dp, c.v + c.own, c.staged_do(at));\n    multiply_gradient(dv, weights, c.staged_do(at) + c.columns<kQTile>());\n    cute::warpgroup_wait<1>();\n    fence(dp);\n    differentiate(c, dp, scores, at);\n"
    s+="    cute::warpgroup_wait<0>();\n    fence(dv);\n    release(c.shared.do_empty[at.stage]);\n"
    if not lean: s+="    pack(ds, dp);\n"
    s+="    write(c, ds, step);\n"
    s+=TAIL%("" if flight else "cute::warpgroup_wait<0>();\n    fence(dk);\n    release(c.shared.q_empty[at.stage]);")
    return s
t=t.replace("steps.end();","steps.end(c, dk);")
for name,(lean,flight) in {'LA':(1,1),'LB':(0,1),'LC':(1,0),'LD':(0,0)}.items():
    out=f'/tmp/var/{name}/warploom/templates'
    open(f'{out}/{T}','w').write(t)
    open(f'{out}/parts/attention_backward/steps_serial.cuh','w').write(body(lean,flight))
