#include "tokenizer/splitter.h"

#include <algorithm>

#include "base/error.h"
#include "base/utf8.h"

namespace train_gpt {

Splitter::Splitter(const std::vector<std::string>& patterns) {
    for (const std::string& pattern : patterns) {
        if (const auto known = known_pattern(pattern)) {
            steps_.emplace_back(*known);
            continue;
        }
        try {
            steps_.emplace_back(Regex(pattern));
        } catch (const Error& error) {
            throw Error("the pattern ", pattern, " cannot be used: ", error.what());
        }
    }
    if (steps_.size() == 1 && std::holds_alternative<Pattern>(steps_[0]))
        only_known_ = std::get<Pattern>(steps_[0]);
}

void Splitter::split_in_steps(std::string_view text, Scratch& scratch, const Visit& piece) const {
    size_t stray = find_not_utf8(text);
    if (stray == text.size()) return split_further(0, text, 0, text.size(), scratch, piece);

    constexpr std::string_view replacement = "\uFFFD";
    scratch.text.clear();
    scratch.stray.clear();
    for (size_t at = 0; at < text.size(); stray = find_not_utf8(text, at)) {
        scratch.text += text.substr(at, stray - at);
        if (stray < text.size()) {
            scratch.stray.push_back(scratch.text.size());
            scratch.text += replacement;
        }
        at = stray + 1;
    }
    size_t replaced = 0, at = 0;  // in `text`
    const Visit original = [&](size_t begin, size_t length) {
        const auto first = scratch.stray.begin() + static_cast<std::ptrdiff_t>(replaced);
        const auto last = std::lower_bound(first, scratch.stray.end(), begin + length);
        const size_t within = static_cast<size_t>(last - first);
        replaced += within;
        length -= within * (replacement.size() - 1);
        piece(at, length);
        at += length;
    };
    split_further(0, scratch.text, 0, scratch.text.size(), scratch, original);
}

void Splitter::split_further(size_t step, std::string_view text, size_t begin, size_t end,
                             Scratch& scratch, const Visit& piece) const {
    if (step == steps_.size()) return piece(begin, end - begin);
    const std::string_view part = text.substr(begin, end - begin);
    const auto pass_on = [&](size_t from, size_t to) {  // in `part`
        if (to > from) split_further(step + 1, text, begin + from, begin + to, scratch, piece);
    };
    if (const Pattern* known = std::get_if<Pattern>(&steps_[step])) {
        for (size_t at = 0; at < part.size();) {
            const size_t length = first_piece(*known, part.substr(at));
            pass_on(at, at + length);
            at += length;
        }
        return;
    }
    const Regex& regex = std::get<Regex>(steps_[step]);
    size_t done = 0, from = 0;
    std::optional<size_t> last_end;
    while (from <= part.size()) {
        const auto match = scratch.matcher.find(regex, part, from);
        if (!match) break;
        from = match->end;
        if (match->begin == match->end && match->end == last_end) {
            // An empty match where the last one ended does not count.
            if (from == part.size()) break;
            do ++from;
            while (from < part.size() && (part[from] & 0xC0) == 0x80);
            continue;
        }
        last_end = match->end;
        pass_on(done, match->begin);
        pass_on(match->begin, match->end);
        done = match->end;
    }
    pass_on(done, part.size());
}

}  // namespace train_gpt
