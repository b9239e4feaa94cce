// train_gpt report --live: a page that follows a run.
#include <cerrno>
#include <csignal>

#include <sys/socket.h>
#include <unistd.h>

#include "parallel/net/socket.h"
#include "test/commands/program.h"

using namespace train_gpt;
using namespace std::chrono_literals;

namespace {

/// What a server at 127.0.0.1 answers to some bytes, until it closes the connection.
std::string answer_to(const std::string& port, const std::string& bytes) {
    const auto deadline = net::Clock::now() + 60s;
    const net::Socket socket = net::connect_to("127.0.0.1", port, deadline);
    REQUIRE(socket);
    REQUIRE(net::send_all(socket, bytes, deadline));
    std::string text;
    for (char byte; net::read_all(socket, {&byte, 1}, deadline);) text += byte;
    return text;
}

std::string request(const std::string& method, const std::string& path,
                    const std::string& host = "localhost") {
    return method + " " + path + " HTTP/1.1\r\nUser-Agent: test\r\nhOST:  " + host + " \r\n\r\n";
}

/// The last step in a page's data.
int64_t last_step(const SortedJson& data) {
    int64_t step = 0;
    for (const SortedJson& difference : data.at("runs").at(0).at("curves").at("loss").at("x"))
        step += difference.get<int64_t>();
    return step;
}

SortedJson content_of(const std::string& answer) {
    return SortedJson::parse(answer.substr(answer.find("\r\n\r\n") + 4));
}

void append_step(const std::string& run, int64_t step) {
    write(run + "/metrics.jsonl",
          read(run + "/metrics.jsonl") + SortedJson{{"step", step}, {"loss", 2.5}}.dump() + "\n");
}

}  // namespace

TEST_CASE("a live report serves the page and its data, which follow the run, and nothing else",
          "[cli][report]") {
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    fs::create_directories(run);
    write(run + "/config.json", "{}");
    write(run + "/metrics.jsonl", "");
    append_step(run, 1);
    const std::string before = read(run + "/metrics.jsonl");
    Process process({"report", "--live", run});
    REQUIRE(process.wait_until([&] { return contains(process.out(), "ssh -L "); }));
    const std::string begin = "the page about run is at http://127.0.0.1:";
    REQUIRE(process.out().starts_with(begin));
    const std::string port =
        process.out().substr(begin.size(), process.out().find('/', begin.size()) - begin.size());
    CHECK(contains(process.out(), concat("ssh -L ", port, ":127.0.0.1:", port, " ")));

    const std::string page = answer_to(port, request("GET", "/"));
    CHECK(page.starts_with("HTTP/1.1 200 OK\r\n"));
    CHECK(contains(page, "\r\nContent-Type: text/html; charset=utf-8\r\n"));
    const size_t head = page.find("\r\n\r\n") + 4;
    CHECK(contains(page, concat("\r\nContent-Length: ", page.size() - head, "\r\n")));
    CHECK(contains(page, "<body data-live>"));
    CHECK(page.ends_with("</html>\n"));
    const SortedJson first = content_of(answer_to(port, request("GET", "/data")));
    CHECK(last_step(first) == 1);
    CHECK(content_of(answer_to(port, request("GET", "/data?x=1"))) == first);

    append_step(run, 2);
    append_step(run, 7);
    const SortedJson second = content_of(answer_to(port, request("GET", "/data")));
    CHECK(last_step(second) == 7);
    CHECK(second.at("stamp") != first.at("stamp"));
    CHECK(contains(answer_to(port, request("GET", "/")), R"("loss":{"x":[1,1,5])"));

    const auto status = [&](const std::string& bytes) {
        const std::string answer = answer_to(port, bytes);
        return answer.substr(0, answer.find("\r\n"));
    };
    CHECK(status(request("GET", "/metrics.jsonl")) == "HTTP/1.1 404 Not Found");
    CHECK(status(request("GET", "/../config.json")) == "HTTP/1.1 404 Not Found");
    for (const char* method : {"POST", "HEAD", "PUT", "DELETE", "get"})
        CHECK(status(request(method, "/")) == "HTTP/1.1 405 Method Not Allowed");
    CHECK(contains(answer_to(port, request("POST", "/")), "\r\nAllow: GET\r\n"));
    CHECK(status("GET / HTTP/1.1\r\n\r\n") == "HTTP/1.1 400 Bad Request");
    CHECK(status("nonsense\r\n\r\n") == "HTTP/1.1 400 Bad Request");
    CHECK(status(std::string(20'000, 'a')) == "HTTP/1.1 400 Bad Request");
    // A host of a stranger whose name leads here
    CHECK(status(request("GET", "/", "evil.example")) == "HTTP/1.1 403 Forbidden");
    CHECK(status(request("GET", "/data", "evil.example:" + port)) == "HTTP/1.1 403 Forbidden");
    for (const std::string& host : {"localhost:" + port, "127.0.0.1:" + port})
        CHECK(status(request("GET", "/data", host)) == "HTTP/1.1 200 OK");
    // Who asks for nothing, or for half of something, keeps nobody waiting. On a machine that is
    // busy for seconds the server may end such connections first.
    bool waits = false;
    for (int round = 0; round < 6 && !waits; ++round) {
        const auto connect = [&] {
            return net::connect_to("127.0.0.1", port, net::Clock::now() + 60s);
        };
        const net::Socket silent = connect(), half = connect();
        REQUIRE(net::send_all(half, "GET / HTTP/1.1\r\n", net::Clock::now() + 60s));
        CHECK(status(request("GET", "/data")) == "HTTP/1.1 200 OK");
        const auto is_open = [](const net::Socket& socket) {
            char byte;
            return ::recv(socket.fd(), &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN;
        };
        waits = is_open(silent) && is_open(half);
        if (!waits) continue;
        // The other half
        REQUIRE(net::send_all(half, "Host: localhost\r\n\r\n", net::Clock::now() + 60s));
        char first[12];
        REQUIRE(net::read_all(half, first, net::Clock::now() + 60s));
        CHECK(std::string(first, sizeof first) == "HTTP/1.1 200");
    }
    CHECK(waits);
    CHECK(read(run + "/metrics.jsonl").starts_with(before));
    CHECK(std::distance(fs::directory_iterator(run), {}) == 2);  // nothing was written

    process.signal(SIGINT);
    const Outcome ended = process.finish();
    CHECK(ended.code == 0);
    CHECK(ended.out.ends_with("\nthe page is no longer served; the runs are not affected\n"));
    CHECK(ended.err.empty());
}

TEST_CASE("a live report at all addresses prints one that can be opened, and SIGTERM ends it",
          "[cli][report]") {
    const TemporaryDirectory directory;
    const std::string run = directory / "run";
    fs::create_directories(run);
    write(run + "/config.json", "{}");
    write(run + "/metrics.jsonl", "");
    append_step(run, 1);
    Process process({"report", "--live", run, "--address", "0.0.0.0"});
    REQUIRE(process.wait_until([&] { return contains(process.out(), "whoever reaches"); }));
    char host[256] = "";
    ::gethostname(host, sizeof host - 1);
    const std::string begin = concat("the page about run is at http://", host, ":");
    REQUIRE(process.out().starts_with(begin));
    const std::string port =
        process.out().substr(begin.size(), process.out().find('/', begin.size()) - begin.size());
    CHECK(contains(process.out(), concat("ssh -L ", port, ":127.0.0.1:", port, " ", host, ", ")));
    CHECK_FALSE(contains(process.out(), "0.0.0.0"));
    CHECK(answer_to(port, request("GET", "/", host)).starts_with("HTTP/1.1 200 OK\r\n"));
    process.signal(SIGTERM);
    const Outcome ended = process.finish();
    CHECK(ended.code == 0);
    CHECK(ended.out.ends_with("\nthe page is no longer served; the runs are not affected\n"));
    CHECK(ended.err.empty());
}

TEST_CASE("a live report refuses what it cannot serve", "[cli][report]") {
    const TemporaryDirectory directory;
    const std::string run = directory / "run", none = directory / "none";
    fs::create_directories(run);
    write(run + "/config.json", "{}");
    write(run + "/metrics.jsonl", "");
    append_step(run, 1);
    check_refused(train_gpt_with({"report", "--live", none}), 1, {none});
    check_refused(train_gpt_with({"report", "--live", run, "--address", "example"}), 1,
                  {"--address", "example", "127.0.0.1"});
    check_refused(train_gpt_with({"report", "--live", run, "--address", "192.0.2.1"}), 1,
                  {"192.0.2.1", "--port"});
    check_refused(train_gpt_with({"report", run, "--port", "1234"}), 2, {"--port", "--live"});
    check_refused(train_gpt_with({"report", run, "--live", "--out", "x"}), 2, {"--out", "--live"});
    check_refused(train_gpt_with({"report", run, "--live", "--port", "70000"}), 2, {"--port"});
    net::Socket taken = net::listen_on(0);
    REQUIRE(taken);
    check_refused(
        train_gpt_with({"report", "--live", run, "--port", std::to_string(net::port_of(taken))}), 1,
        {"cannot listen on port", "--port 0"});
}
