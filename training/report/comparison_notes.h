// What keeps runs from being compared.
#pragma once
#include <string>
#include <vector>

#include "training/report/recorded_run.h"

namespace train_gpt {

/// What somebody must know who compares these runs: different models, vocabularies or data. Each
/// text is a sentence, which begins without a capital. Empty for one run.
std::vector<std::string> notes_on_comparison(const std::vector<RecordedRun>& runs);

}  // namespace train_gpt
