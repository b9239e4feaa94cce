// The end of the text as validation: for a single document, such as a book.
#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "dataloader/documents.h"

namespace train_gpt {

/// The source that holds all of the text where it is plain text that is packed or piped; null where
/// there is none. (Empty files do not count.)
Source* find_single_text(std::vector<Source>& sources);

/// Reads this source into source.held while it fits into memory (kMaxDocumentBytes) and, with
/// `only_document`, may be one document. Returns whether that was all of it. Damage, with
/// `skip_damage`, ends it. While `stop` is set, waiting for standard input ends with an Error.
bool hold_text(Source& source, bool only_document, bool skip_damage, const std::atomic<bool>& stop);

/// Where validation begins in the bytes of all files in their order, or their number when there is
/// none: `fraction` of them before the end, at the line border nearest behind (or else before) that
/// place; where lines are too long for that, between two UTF-8 characters. All sources are plain
/// files, or held.
int64_t tail_begin(const std::vector<Source>& sources, double fraction);

/// Whether all of the text is one document of one plain file.
bool is_single_document(const std::vector<Source>& sources);

}  // namespace train_gpt
