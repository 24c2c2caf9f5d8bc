{# score_members #}
  float slope;     // of the head, times -unit; where scores lean(), times the sign of distances
  float distance;  // from the thread's first column to where its first row stands
{# score_begin #}
    slope = -{{ "of_1 * " if operation.bias == "none" }}p.alibi_slopes[number_of(sequence) * p.alibi_batch + head];
    distance = row + sequence.columns(p) - sequence.rows(p) - column;
{# begin_again #}
  const float slope = -p.alibi_slopes[number * p.alibi_batch + at.head];
