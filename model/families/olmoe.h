// OLMoE.
#pragma once
#include "model/families/family.h"

namespace train_gpt {

extern const Family olmoe;

}  // namespace train_gpt
