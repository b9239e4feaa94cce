// The end of the text as validation: for a single document, such as a book.
#pragma once
#include <cstdint>
#include <vector>

#include "dataloader/documents.h"

namespace train_gpt {

/// Where validation begins in the bytes of all files in their order, or their number when there is none:
/// `fraction` of them before the end, at the line border nearest behind (or else before) that place;
/// where lines are too long for that, between two UTF-8 characters. All sources are plain files.
int64_t tail_begin(const std::vector<Source>& sources, double fraction);

/// Whether all of the text is one document of one plain file.
bool is_single_document(const std::vector<Source>& sources);

}  // namespace train_gpt
