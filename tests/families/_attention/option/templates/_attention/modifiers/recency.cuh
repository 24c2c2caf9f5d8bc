{# score_members #}
  float rate;  // of the head, times unit
  int first_column;
{# score_begin #}
    rate = {{ "of_1 * " if operation.bias == "none" }}p.recency[head];
    first_column = column;
{# begin_again #}
  const float rate = p.recency[at.head];
