// The JDK's HttpClient as it comes: it offers to upgrade to HTTP/2 over plain HTTP.

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.stream.Collectors;
import java.util.stream.Stream;

public class JdkClient {
    static final int TURNS = 5;
    static final HttpClient CLIENT = HttpClient.newHttpClient();
    static String url;
    static String model;

    interface Session {
        void run() throws Exception;
    }

    static HttpRequest request(String fields) {
        String body = "{\"model\": \"" + model + "\", \"reasoning_effort\": \"none\", " + fields + "}";
        return HttpRequest.newBuilder(URI.create(url + "/v1/chat/completions"))
            .header("content-type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString(body))
            .build();
    }

    static HttpResponse<String> post(String fields) throws Exception {
        return CLIENT.send(request(fields), HttpResponse.BodyHandlers.ofString());
    }

    static void check(boolean holds, String what) {
        if (!holds) {
            throw new IllegalStateException(what);
        }
    }

    static String asked(String text) {
        return "\"messages\": [{\"role\": \"user\", \"content\": \"" + text + "\"}], \"max_tokens\": 8";
    }

    static void chat() throws Exception {
        for (int i = 0; i < TURNS; i++) { // over one connection
            HttpResponse<String> answer = post(asked("Say something."));
            check(answer.statusCode() == 200, answer.body());
            check(answer.body().contains("\"completion_tokens\":8"), answer.body());
        }
    }

    static void stream() throws Exception {
        HttpResponse<Stream<String>> answer = CLIENT.send(
            request(asked("Say something.") + ", \"stream\": true"),
            HttpResponse.BodyHandlers.ofLines());
        String lines = answer.body().collect(Collectors.joining("\n"));
        check(answer.statusCode() == 200 && lines.strip().endsWith("data: [DONE]"), lines);
    }

    static void error() throws Exception {
        HttpResponse<String> answer = post(asked("word ".repeat(30_000)));
        check(answer.statusCode() == 400, answer.body());
        check(answer.body().contains("maximum context length"), answer.body());
    }

    public static void main(String[] arguments) {
        url = arguments[0];
        model = arguments[1];
        Map<String, Session> sessions = new LinkedHashMap<>();
        sessions.put("chat", JdkClient::chat);
        sessions.put("stream", JdkClient::stream);
        sessions.put("error", JdkClient::error);
        String outcomes = sessions.entrySet().stream()
            .map(entry -> "\"" + entry.getKey() + "\": \"" + outcome(entry.getValue()) + "\"")
            .collect(Collectors.joining(", "));
        System.out.println("OUTCOMES {" + outcomes + "}");
    }

    static String outcome(Session session) {
        try {
            session.run();
            return "ok";
        } catch (Exception error) {
            error.printStackTrace();
            return error.toString().replaceAll("[\"\\\\\n]", "'").substring(0, Math.min(300, error.toString().length()));
        }
    }
}
