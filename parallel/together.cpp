#include "parallel/together.h"

#include "base/json_text.h"

namespace train_gpt {

std::vector<std::string> together(const World& world, const std::function<std::string()>& work) {
    if (world.size() == 1) return {work()};
    constexpr char done = '+', failed = '-';
    std::string answer;
    try {
        answer = done + work();
    } catch (const std::exception& error) {
        answer = failed + message_of(error);
    }
    std::vector<std::string> answers = world.all_gather(answer);
    for (size_t rank = 0; rank < answers.size(); ++rank) {
        const bool good = answers[rank][0] == done;
        answers[rank].erase(0, 1);
        if (!good) throw SharedError(world.describe(static_cast<int>(rank)), ": ", answers[rank]);
    }
    return answers;
}

std::string first_for_all(const World& world, const std::function<std::string()>& work) {
    return together(world, [&] { return world.rank() == 0 ? work() : ""; }).front();
}

void require_same(const World& world, const std::map<std::string, std::string>& facts) {
    if (world.size() == 1) return;
    std::vector<std::map<std::string, std::string>> of_rank;
    for (const std::string& text : world.all_gather(to_text(facts)))
        of_rank.push_back(parse_json(text));
    const std::vector<std::string> hosts = world.all_gather(world.host());

    std::map<std::string, std::map<std::string, std::vector<int>>>
        ranks_with;  // name → value → ranks
    for (int rank = 0; rank < world.size(); ++rank)
        for (const auto& [name, value] : of_rank[static_cast<size_t>(rank)])
            ranks_with[name][value].push_back(rank);
    std::string differences;
    for (const auto& [name, values] : ranks_with) {
        if (values.size() == 1 &&
            values.begin()->second.size() == static_cast<size_t>(world.size()))
            continue;
        differences += "\n  " + name + ":";
        for (const auto& [value, ranks] : values) {
            constexpr size_t shown = 8;
            differences += concat(" ", value, " on rank", ranks.size() > 1 ? "s" : "");
            for (size_t i = 0; i < std::min(ranks.size(), shown); ++i)
                differences += concat(i ? ", " : " ", ranks[i], " (",
                                      hosts[static_cast<size_t>(ranks[i])], ")");
            if (ranks.size() > shown) differences += concat(" and ", ranks.size() - shown, " more");
            differences += ";";
        }
        differences.pop_back();
    }
    if (!differences.empty())
        throw SharedError(
            "the ranks do not agree on what to do; start all of them with the same program, "
            "configuration and data:",
            Lines{differences});
}

}  // namespace train_gpt
