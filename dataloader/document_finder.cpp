#include "dataloader/document_finder.h"

#include <cstdio>

#include "base/utf8.h"

namespace train_gpt {

void add(std::vector<LeftOut>& all, const LeftOut& more) {
    for (LeftOut& known : all)
        if (known.reason == more.reason) {
            known.count += more.count;
            return;
        }
    all.push_back(more);
}

void count(PreparationState& state, const Batch& batch, const Outcome& outcome) {
    for (const Split split : splits) {
        state.documents[index_of(split)] += outcome.documents[index_of(split)];
        state.bytes[index_of(split)] += outcome.bytes[index_of(split)];
        state.sources[batch.source].documents += outcome.documents[index_of(split)];
    }
    for (const LeftOut& left : outcome.left_out) add(state.left_out, left);
    PreparedSource& source = state.sources[batch.source];
    if (outcome.not_utf8 > 0 && source.not_utf8 == 0) {
        const size_t at = *outcome.first_not_utf8;
        source.first_not_utf8 = batch.begin + static_cast<int64_t>(at);
        const std::string_view before = std::string_view(*batch.storage).substr(0, at);
        source.first_not_utf8_line =
            batch.line + 1 + std::count(before.begin(), before.end(), '\n');
    }
    source.not_utf8 += outcome.not_utf8;
    source.nulls += batch.nulls;
    state.position = batch.end;
    if (!batch.last) return;
    if (!batch.damage.empty()) add(state.left_out, {reason_damaged, 1, source.path});
    char hash[17];
    std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(batch.end.hash));
    source.bytes = batch.end.offset;
    source.hash = hash;
    state.position = {batch.source + 1, 0, 0, false, 0};
}

LineFault DocumentFinder::fault_of_row(std::string_view text) {
    const size_t bad = find_not_utf8(text);
    if (bad == text.size()) return {};
    char byte[8];
    std::snprintf(byte, sizeof byte, "0x%02X", static_cast<unsigned char>(text[bad]));
    return {"is not UTF-8", concat("the byte ", byte), bad + 1};
}

void DocumentFinder::look_at(const Batch& batch, std::string_view text, Outcome& outcome) {
    if (const size_t first = find_not_utf8(text); first < text.size()) {
        if (!outcome.first_not_utf8)
            outcome.first_not_utf8 =
                static_cast<size_t>(text.data() - batch.storage->data()) + first;
        outcome.not_utf8 += count_not_utf8(text.substr(first));
    }
    outcome.has_crlf = outcome.has_crlf || text.find("\r\n") != text.npos;
}

void DocumentFinder::refuse(const Batch& batch, int64_t line, const LineFault& fault,
                            Outcome& outcome) const {
    const Source& source = sources_[batch.source];
    const char* what = name_of(batch.record);
    const std::string detail =
        concat(fault.detail, fault.column > 0 && !fault.detail.empty() ? ", " : "",
               fault.column > 0 ? concat("at its byte ", fault.column) : "");
    if (!skips_bad_) {
        std::string advice;
        if (fault.reason.find("field") != std::string::npos)
            advice = ", or --field NAME to name the field";
        else if (line == 1 && batch.record == Record::line && source.path.ends_with(".json"))
            advice = concat(
                "; if the texts are a list inside an object, write them as lines: "
                "jq -c '.NAME[]' ",
                source.path, " > texts.jsonl");
        throw Error(what, " ", line, " of ", source.name(), " ", fault.reason,
                    detail.empty() ? "" : " (" + detail + ")",
                    "; fix it, or use --skip-bad to leave such ", what, "s out", advice);
    }
    add(outcome.left_out, {fault.reason, 1, source.path, line, batch.record, detail});
}

}  // namespace train_gpt
