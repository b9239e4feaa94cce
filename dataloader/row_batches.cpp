#include "dataloader/row_batches.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/error.h"

namespace train_gpt {

namespace {

constexpr size_t row_batch_bytes = 1 << 20;
constexpr size_t batch_rows = 1 << 14;  // rows may be empty

}  // namespace

RowBatches::RowBatches(const Source& source, const Position& start, const DocumentRules& rules)
    : source_(source), rules_(rules) {
    ::XXH3_64bits_reset(hash_.get());
    position_.hash = ::XXH3_64bits_digest(hash_.get());
    position_.source = start.source;
    try {
        column_ = std::make_unique<parquet::TextColumn>(source.path, source.column);
    } catch (const parquet::DamagedFile& error) {
        if (!rules.skip_damage) throw;
        damage_ = error.damage();
        ended_ = true;
        return;
    }
    const parquet::RandomFile& file = column_->file();
    if (file.size() != source.size || file.modified() != source.modified)
        throw Error(source.path,
                    " changed after this command had begun; run it again when nothing writes to "
                    "it");
    if (start.line > 0) skip_to(start);
}

/// Makes sure that a row is read; false at the end.
bool RowBatches::read_row() {
    if (has_row_ || ended_) return has_row_;
    try {
        const parquet::TextColumn::Row row = column_->next(text_);
        ended_ = row == parquet::TextColumn::Row::end;
        is_null_ = row == parquet::TextColumn::Row::null;
        if (is_null_) text_ = {};
    } catch (const parquet::DamagedFile& error) {
        if (!rules_.skip_damage) throw;
        damage_ = error.damage();
        ended_ = true;
    }
    has_row_ = !ended_;
    return has_row_;
}

void RowBatches::advance(std::string_view texts, int64_t rows) {
    ::XXH3_64bits_update(hash_.get(), texts.data(), texts.size());
    position_.offset += std::ssize(texts);
    position_.line += rows;
}

/// Skips to where an interrupted run stopped, by reading: this shows whether the texts before are
/// unchanged.
void RowBatches::skip_to(const Position& start) {
    while (position_.line < start.line && read_row()) {
        advance(text_, 1);
        has_row_ = false;
    }
    position_.hash = ::XXH3_64bits_digest(hash_.get());
    if (position_.line != start.line || position_.offset != start.offset ||
        position_.hash != start.hash)
        throw Error(source_.name(), " is not what it was when this command was interrupted (up to ",
                    "row ", start.line, "); give it the same again, or remove the folder ",
                    staging_folder, " to start again");
}

std::optional<Batch> RowBatches::next() {
    if (done_) return {};
    Batch batch;
    batch.source = position_.source;
    batch.begin = position_.offset;
    batch.line = position_.line;
    batch.record = Record::row;
    const auto storage = std::make_shared<std::string>();
    std::vector<size_t> ends;
    while (storage->size() < row_batch_bytes && ends.size() < batch_rows && read_row()) {
        if (std::ssize(text_) > max_document_bytes) {
            if (!ends.empty()) break;
            batch.line_too_long = true;
            advance(text_, 1);
            has_row_ = false;
            break;
        }
        storage->append(text_);
        ends.push_back(storage->size());
        batch.nulls += is_null_;
        has_row_ = false;
    }
    if (storage->size() < row_batch_bytes / 2) storage->shrink_to_fit();
    const std::optional<Split> split = only_split(rules_.val_fraction);
    batch.parts.reserve(ends.size());
    size_t begin = 0;
    for (const size_t end : ends) {
        const std::string_view text = std::string_view(*storage).substr(begin, end - begin);
        batch.parts.push_back({text, true, true, split});
        begin = end;
    }
    advance(*storage, std::ssize(ends));
    position_.hash = ::XXH3_64bits_digest(hash_.get());
    batch.storage = storage;
    batch.end = position_;
    batch.can_restart = true;
    batch.file_bytes = column_ ? column_->file_bytes() : 0;
    if (ends.empty() && !batch.line_too_long) {
        batch.last = done_ = true;
        batch.damage = damage_;
    }
    return batch;
}

}  // namespace train_gpt
