// Mixtral.
#pragma once
#include "model/families/family.h"

namespace train_gpt {

extern const Family mixtral;

}  // namespace train_gpt
