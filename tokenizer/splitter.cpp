#include "tokenizer/splitter.h"

#include "base/error.h"

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
    RegexMatcher& matcher = scratch.matchers[step];
    matcher.begin(std::get<Regex>(steps_[step]), part);
    size_t done = 0;
    while (const auto match = matcher.next()) {
        pass_on(done, match->begin);
        pass_on(match->begin, match->end);
        done = match->end;
    }
    pass_on(done, part.size());
}

}  // namespace train_gpt
