// Settings that count for nothing: of experts in a model without them, of a scaling that is off, ….
#pragma once
#include <string>

#include "model/spec.h"
#include "training/config/config.h"

namespace train_gpt {

/// Names a setting that differs from its default although another setting keeps it from being read,
/// and says what to set. Empty if there is none. decoder: the configuration's model.
std::string unread_setting(const Config& config, const DecoderSpec& decoder);

}  // namespace train_gpt
