constexpr uint32_t kHidden = 0xff800000;  // the score of what does not attend: -inf
