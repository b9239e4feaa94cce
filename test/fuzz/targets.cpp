#include "test/fuzz/targets.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <nlohmann/json.hpp>
#include <sys/mman.h>
#include <unistd.h>

#include "base/crc32.h"
#include "base/error.h"
#include "dataloader/json_array.h"
#include "dataloader/jsonl.h"
#include "dataloader/parquet/text_column.h"
#include "dataloader/shard.h"
#include "tokenizer/formats.h"
#include "tokenizer/tokenizer.h"
#include "training/config/config.h"
#include "training/config/config_text.h"
#include "training/config/load_config.h"
#include "training/evaluations/task_tokens.h"
#include "training/files/safetensors.h"

namespace train_gpt {

namespace {

using Bytes = std::span<const std::byte>;

/// A file in memory.
class MemoryFile {
  public:
    explicit MemoryFile(Bytes bytes) : file_(::memfd_create("fuzz", MFD_CLOEXEC)) {
        if (file_ < 0) throw std::system_error(errno, std::generic_category(), "memfd_create");
        for (size_t written = 0; written < bytes.size();) {
            const ssize_t n = ::write(file_, bytes.data() + written, bytes.size() - written);
            if (n < 0) throw std::system_error(errno, std::generic_category(), "write");
            written += static_cast<size_t>(n);
        }
    }
    ~MemoryFile() { ::close(file_); }
    MemoryFile(const MemoryFile&) = delete;
    MemoryFile& operator=(const MemoryFile&) = delete;

    std::string path() const { return "/proc/self/fd/" + std::to_string(file_); }

  private:
    int file_;
};

/// Another name for a file, in the folder of temporary files.
class Link {
  public:
    Link(const std::string& file, const std::string& name)
        : path_(std::filesystem::temp_directory_path() / name) {
        std::filesystem::remove(path_);
        std::filesystem::create_symlink(file, path_);
    }
    ~Link() {
        std::error_code ignored;
        std::filesystem::remove(path_, ignored);
    }
    Link(const Link&) = delete;
    Link& operator=(const Link&) = delete;

    const std::filesystem::path& path() const { return path_; }

  private:
    std::filesystem::path path_;
};

/// The file's bytes before and after its first zero byte.
std::pair<Bytes, Bytes> halves(Bytes bytes) {
    size_t at = 0;
    while (at < bytes.size() && bytes[at] != std::byte{}) ++at;
    return {bytes.first(at), bytes.subspan(std::min(bytes.size(), at + 1))};
}

void promise(bool kept, const char* what) {
    if (!kept) throw std::logic_error(what);
}

std::string without_spaces(std::string_view text) {
    std::string rest;
    std::ranges::copy_if(text, std::back_inserter(rest), [](char c) { return c != ' '; });
    return rest;
}

/// Checks that any text is what its tokens decode to, with a vocabulary that was written and read
/// back. A vocabulary with a prefix space adds one at the beginning and after each added token; one
/// that normalises changes a text, but not what it has decoded.
void use(const TokenizerDefinition& definition, Bytes text_bytes) {
    const bool prefix = definition.add_prefix_space;
    const std::string json = write_tokenizer_json(definition);
    const MemoryFile written(std::as_bytes(std::span(json)));
    const Tokenizer tokenizer = Tokenizer::load(written.path());
    const std::string_view text(reinterpret_cast<const char*>(text_bytes.data()),
                                std::min<size_t>(text_bytes.size(), 4096));
    const std::string back = tokenizer.decode(tokenizer.encode(text));
    promise(back == text || (definition.nfc && tokenizer.decode(tokenizer.encode(back)) == back) ||
                (prefix && without_spaces(back) == without_spaces(text)),
            "a text is not what its tokens decode to");
    promise(
        tokenizer.decode(tokenizer.encode_with_special(text)) == back || prefix || definition.nfc,
        "special tokens change a text");
}

bool fuzz_tokenizer_json(Bytes bytes) {
    const MemoryFile file(bytes);
    use(read_tokenizer_json(file.path()), bytes);
    return true;
}

bool fuzz_vocab_and_merges(Bytes bytes) {
    const auto [vocab, merges] = halves(bytes);
    const MemoryFile vocab_file(vocab), merges_file(merges);
    use(read_vocab_and_merges(vocab_file.path(), merges_file.path()), bytes);
    return true;
}

bool fuzz_tiktoken(Bytes bytes) {
    // The name selects the pattern.
    const MemoryFile file(bytes);
    const Link link(file.path(), concat("cl100k_fuzz_", ::getpid(), ".tiktoken"));
    use(read_tiktoken(link.path()), bytes);
    return true;
}

bool fuzz_shard(Bytes bytes) {
    const MemoryFile file(bytes);
    constexpr uint32_t vocab_size = 1000;
    const TokenShards shards(file.path(), vocab_size);
    promise(shards.shard_count() == 1 && shards.total_tokens() == shards.shard_tokens(0),
            "one file is not one shard");
    (void)shards.fingerprint();
    std::vector<int32_t> tokens(
        static_cast<size_t>(std::min<int64_t>(shards.total_tokens(), 4096)));
    shards.copy(0, shards.total_tokens() - std::ssize(tokens), std::ssize(tokens), tokens.data());
    for (const int32_t token : tokens)
        promise(token >= 0 && token < static_cast<int32_t>(vocab_size),
                "a token beyond the vocabulary");
    return true;
}

bool fuzz_safetensors(Bytes bytes) {
    const MemoryFile path(bytes);
    const SafetensorsFile file(path.path());
    for (const TensorInfo& tensor : file.tensors()) {
        promise(file.data(tensor).size() == tensor.end - tensor.begin, "a tensor of another size");
        promise(file.find(tensor.name) != nullptr, "a tensor without a name");
        const int64_t n = std::min<int64_t>(tensor.numel(), 1024);
        std::vector<float> values(static_cast<size_t>(n));
        try {
            file.read_floats(tensor, values.data(), tensor.numel() - n, n);
        } catch (const Error&) {  // of another type
        }
        try {
            (void)file.read_integers(tensor);
        } catch (const Error&) {
        }
    }
    return true;
}

/// The elements of an array as lines. If the text is a valid JSON array, there must be one line for
/// each element, equal to it.
std::string lines_of_array(std::string_view text) {
    std::string lines(text.substr(text.find('[') + 1));
    size_t size = 0;
    ArrayScanner scanner;
    for (size_t i = 0; i < lines.size(); ++i) {
        const ArrayScanner::Byte byte = scanner.next(lines[i]);
        if (byte != ArrayScanner::Byte::of_element) size = i + 1;
        if (byte == ArrayScanner::Byte::end) break;
    }
    array_to_lines(lines, size);
    lines.resize(size);
    const auto array = nlohmann::json::parse(text, nullptr, false);
    if (!array.is_array() || text.find('\0') != text.npos) return lines;
    std::string_view rest = lines;
    for (const nlohmann::json& element : array) {
        const std::string_view line = rest.substr(0, rest.find('\n'));
        promise(nlohmann::json::parse(line, nullptr, false) == element,
                "a line that is not its element");
        rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    }
    promise(is_blank(rest), "more lines than elements");
    return lines;
}

bool fuzz_jsonl(Bytes bytes) {
    const std::string_view all(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const bool is_array = begins_array(all);
    const std::string lines = is_array ? lines_of_array(all) : std::string();
    std::string_view rest = is_array ? lines : all;
    bool taken = false;
    while (!rest.empty()) {
        const std::string_view line = rest.substr(0, rest.find('\n'));
        rest.remove_prefix(std::min(rest.size(), line.size() + 1));
        std::string text;
        const LineFault fault = read_field(line, "text", text, is_array);
        promise(fault.column <= line.size() + 1, "a fault after the line");
        promise(!fault.reason.empty() || text.size() <= line.size(), "a text longer than its line");
        taken = taken || fault.reason.empty();
    }
    return taken;
}

/// Checks that no more rows come than the file says, and that progress goes forward.
bool fuzz_parquet(Bytes bytes) {
    const MemoryFile file(bytes);
    parquet::TextColumn column(file.path(), "text");
    constexpr int most_rows = 10'000;
    constexpr size_t most_bytes = 1 << 24;
    using Row = parquet::TextColumn::Row;
    std::string_view text;
    int64_t before = 0;
    size_t all = 0;
    for (int row = 0; row < most_rows && all < most_bytes; ++row) {
        const Row next = column.next(text);
        promise(column.file_bytes() >= before && column.file_bytes() <= std::ssize(bytes),
                "progress goes back, or beyond the end");
        before = column.file_bytes();
        if (next == Row::end) return true;
        if (next != Row::text) continue;
        all += text.size();
        promise(crc32(text) == crc32(std::string(text)), "a text changes");  // reads all of it
    }
    return true;
}

/// Checks that every item that is accepted has a right answer, and can be asked.
bool fuzz_tasks(Bytes bytes) {
    static const Tokenizer tokenizer =
        Tokenizer::train(std::vector<std::string_view>{"a task of a few words"}, 260);
    const MemoryFile file(bytes);
    const Task task = read_task(file.path());
    const TaskTokens tokens(task, tokenizer, 32);
    for (size_t i = 0; i < std::min<size_t>(task.items.size(), 4); ++i) {
        const TaskItem& item = task.items[i];
        promise(item.gold < task.choices(item), "the right answer is none of the answers");
        const std::vector<AnswerTokens> answers = tokens.answers(i, tokenizer.vocab_size());
        promise(answers.size() == task.choices(item), "an answer has no tokens");
        for (const AnswerTokens& answer : answers)
            for (const size_t from : {answer.scored_from, answer.answer_from})
                promise(from >= 1 && from <= answer.tokens.size() && answer.tokens.size() <= 33,
                        "an answer is not within its tokens");
    }
    return true;
}

bool fuzz_config(Bytes bytes) {
    const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    const std::string printed = to_json(parse_config(text, "fuzz"));
    promise(to_json(parse_config(printed, "printed")) == printed,
            "a configuration reads back as another");
    return true;
}

template <bool (*reader)(Bytes)>
bool refusing(Bytes bytes) {
    try {
        return reader(bytes);
    } catch (const Error&) {
        return false;
    }
}

constexpr FuzzTarget targets[] = {
    {"tokenizer_json", refusing<fuzz_tokenizer_json>},
    {"vocab_and_merges", refusing<fuzz_vocab_and_merges>},
    {"tiktoken", refusing<fuzz_tiktoken>},
    {"shard", refusing<fuzz_shard>},
    {"safetensors", refusing<fuzz_safetensors>},
    {"jsonl", refusing<fuzz_jsonl>},
    {"parquet", refusing<fuzz_parquet>},
    {"tasks", refusing<fuzz_tasks>},
    {"config", refusing<fuzz_config>},
};

}  // namespace

std::span<const FuzzTarget> fuzz_targets() { return targets; }

}  // namespace train_gpt
