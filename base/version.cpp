#include "base/version.h"

#ifndef TRAIN_GPT_VERSION
#define TRAIN_GPT_VERSION "unknown"
#endif

namespace train_gpt {

std::string version() { return TRAIN_GPT_VERSION; }

}  // namespace train_gpt
