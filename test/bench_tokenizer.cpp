// The tokenizer's side of its benchmark: scripts/bench_tokenizer.py writes commands to stdin, one
// per line, and reads the seconds that each took. Reading files and loading vocabularies is not
// timed.
//
//   load VOCABULARY TOKENIZER_JSON    loads, saves as tokenizer.json   → name of the pattern
//   encode TEXT THREADS [IDS]         encodes; the ids go to a file    → seconds
//   train TEXT THREADS VOCAB_SIZE TOKENIZER_JSON
//                                     → seconds to count words, seconds to learn merges
//
// A text is a file of documents, one after another; their lengths are in TEXT.lengths, one per
// line.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/file.h"
#include "tokenizer/tokenizer.h"
#include "tokenizer/word_counts.h"

namespace train_gpt {
namespace {

class Stopwatch {
  public:
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }

  private:
    std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

struct Documents {
    explicit Documents(const std::string& path) : file(path) {
        std::ifstream lengths(path + ".lengths");
        size_t at = 0;
        for (size_t length; lengths >> length; at += length)
            documents.push_back(file.text().substr(at, length));
        if (at != file.text().size())
            throw Error(path,
                        ".lengths does not add up to the text; run scripts/bench_tokenizer.py");
    }
    MappedFile file;
    std::vector<std::string_view> documents;
};

/// Runs work(thread, document) for all documents; each thread takes the next one when it is free.
void over_documents(const Documents& text, size_t threads,
                    const std::function<void(size_t, size_t)>& work) {
    std::atomic<size_t> next{0};
    const auto loop = [&](size_t thread) {
        for (size_t i; (i = next++) < text.documents.size();) work(thread, i);
    };
    std::vector<std::thread> others;
    for (size_t thread = 1; thread < threads; ++thread) others.emplace_back(loop, thread);
    loop(0);
    for (std::thread& other : others) other.join();
}

double encode(const Tokenizer& tokenizer, const Documents& text, size_t threads,
              const std::string& ids_path) {
    std::vector<std::vector<uint32_t>> ids(text.documents.size());
    const Stopwatch watch;
    std::vector<Encoder> encoders;
    for (size_t thread = 0; thread < threads; ++thread) encoders.emplace_back(tokenizer);
    over_documents(text, threads, [&](size_t thread, size_t document) {
        encoders[thread].encode(text.documents[document], ids[document]);
    });
    const double seconds = watch.seconds();
    if (!ids_path.empty()) {
        std::ofstream out(ids_path, std::ios::binary);
        for (const auto& document : ids)
            out.write(reinterpret_cast<const char*>(document.data()),
                      static_cast<std::streamsize>(document.size() * sizeof(uint32_t)));
    }
    return seconds;
}

std::pair<double, double> train(const Documents& text, size_t threads, uint32_t vocab_size,
                                const std::string& out) {
    const Stopwatch counting;
    std::vector<WordCounts> counts(threads, WordCounts(Pattern::gpt2));
    over_documents(text, threads, [&](size_t thread, size_t document) {
        counts[thread].add(text.documents[document]);
    });
    for (size_t thread = 1; thread < threads; ++thread) counts[0].merge(std::move(counts[thread]));
    const double counted = counting.seconds();
    const Stopwatch merging;
    const Tokenizer tokenizer = Tokenizer::train(counts[0], vocab_size);
    const double merged = merging.seconds();
    tokenizer.save(out);
    return {counted, merged};
}

void serve() {
    std::optional<Tokenizer> tokenizer;
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string command, path, out;
        size_t threads = 1;
        words >> command >> path;
        if (command == "load") {
            words >> out;
            tokenizer = Tokenizer::load(path);
            tokenizer->save(out);
            const auto pattern = known_pattern(tokenizer->patterns().front());
            if (!pattern || tokenizer->patterns().size() > 1)
                throw Error(
                    path,
                    " does not cut text by one of the patterns in scripts/tokenizer_patterns.py");
            std::cout << pattern_name(*pattern) << std::endl;
        } else if (command == "encode" && tokenizer) {
            words >> threads >> out;
            std::cout << encode(*tokenizer, Documents(path), threads, out) << std::endl;
        } else if (command == "train") {
            uint32_t vocab_size = 0;
            words >> threads >> vocab_size >> out;
            const auto [counted, merged] = train(Documents(path), threads, vocab_size, out);
            std::cout << counted << ' ' << merged << std::endl;
        } else {
            throw Error("'", line, "' is no command; scripts/bench_tokenizer.py knows them");
        }
    }
}

}  // namespace
}  // namespace train_gpt

int main() {
    try {
        train_gpt::serve();
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "bench_tokenizer: %s\n", error.what());
        return 1;
    }
}
