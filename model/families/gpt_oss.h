// gpt-oss.
#pragma once
#include "model/families/family.h"

namespace train_gpt {

extern const Family gpt_oss;

}  // namespace train_gpt
