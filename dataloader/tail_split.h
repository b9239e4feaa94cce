// The end of the text as the validation split: for a single document, such as a book.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "dataloader/documents.h"

namespace train_gpt {

/// The only source, if there is only one and it is plain text that is compressed or piped; else
/// null. (Empty plain files do not count.)
Source* find_single_text(std::vector<Source>& sources);

/// Reads this source into source.held as long as it fits into memory (max_document_bytes) and, with
/// `only_document`, as long as it may be a single document. Returns whether all of it was read.
/// With `skip_damage`, the text ends where it is damaged. While `stop` is set, waiting for standard
/// input ends with an Error.
bool hold_text(Source& source, bool only_document, bool skip_damage, const std::atomic<bool>& stop);

/// Where validation begins in the bytes of all files in order; their total number if there is no
/// validation. It begins `fraction` of the bytes before the end, at the nearest line boundary after
/// (or else before) that place; if lines are too long for that, between two UTF-8 characters. All
/// sources must be plain files, or held.
int64_t tail_begin(const std::vector<Source>& sources, double fraction);

/// Whether all of the text is one document in one plain file.
bool is_single_document(const std::vector<Source>& sources);

}  // namespace train_gpt
