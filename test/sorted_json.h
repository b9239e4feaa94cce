// JSON whose objects sort their keys, so that they are equal in any order. train_gpt::Json keeps
// the order.
#pragma once

#include <nlohmann/json.hpp>

namespace train_gpt {

using SortedJson = nlohmann::json;

}  // namespace train_gpt
