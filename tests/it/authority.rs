//! Authorities with their answers, over real sockets.

use http::{Method, Request, StatusCode};
use strait::tools::hbone::ConnectError;

use crate::support::raw::{Ending, RawPeer};
use crate::support::{Endpoint, Gateway, Net, Settings, identities, run};

/// The status of a CONNECT, or the code by which its stream was reset.
async fn answer(client: &strait::tools::hbone::Client, authority: &str) -> String {
    describe(client.tunnel(authority).await)
}

fn describe(result: Result<strait::tools::hbone::Tunnel, ConnectError>) -> String {
    match result {
        Ok(_) => "200".to_owned(),
        Err(ConnectError::Status(status)) => status.as_u16().to_string(),
        Err(ConnectError::Http2(error)) => format!("{:?}", error.reason()),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn each_authority_has_the_answer_of_the_contract() {
    run(async {
        let net = Net::new();
        let gateway =
            Gateway::start(&Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")])).await;
        let _endpoint = net.listen(11, 9000).await;
        let client = gateway.client(identities()).await;
        let long = format!("{}:80", "a".repeat(253));
        let cases = [
            ("echo.app.svc.cluster.local:80", "200"),
            ("ECHO.App.svc.cluster.local:80", "200"),
            ("echo.app.svc.cluster.local.:80", "200"),
            ("echo.global:80", "200"),
            ("240.0.0.1:80", "200"),
            ("echo.app.svc.cluster.local:81", "503"),
            ("echo.global:81", "503"),
            ("240.0.0.2:80", "503"),
            ("[2001:db8::1]:80", "503"),
            ("secret.app.svc.cluster.local:80", "503"),
            ("unknown.app.svc.cluster.local:80", "503"),
            ("127.0.0.1:80", "503"),
            ("169.254.169.254:80", "503"),
            ("echo.app.svc.cluster.local", "400"),
            ("echo.app.svc.cluster.local:0", "400"),
            ("echo.app.svc.cluster.local:65536", "400"),
            ("echo.app.svc.cluster.local:+80", "400"),
            ("echo.app.svc.cluster.local:080", "400"),
            ("user@echo.app.svc.cluster.local:80", "400"),
            ("0177.0.0.1:80", "400"),
            ("[fe80::1%25eth0]:80", "400"),
            // The `http` crate accepts a comma; our own parser does not.
            ("echo.app,other:80", "400"),
            (":80", "400"),
            (&long, "400"),
        ];
        for (authority, want) in cases {
            assert_eq!(answer(&client, authority).await, want, "{authority:?}");
        }
        assert_eq!(gateway.tunnels("bad_authority").await, 11.0);
        assert_eq!(gateway.tunnels("not_exposed").await, 1.0);
    });
}

#[test]
fn what_is_no_plain_connect_is_refused() {
    run(async {
        let gateway = Gateway::start(&Settings::new(Net::new(), identities())).await;
        let client = gateway.client(identities()).await;
        for method in [Method::GET, Method::POST, Method::OPTIONS] {
            let uri = "https://echo.app.svc.cluster.local:80/";
            let request = Request::builder().method(&method).uri(uri).body(()).expect("a request");
            assert_eq!(describe(client.request(request).await), "405", "{method}");
        }
        let mut many = Request::connect("echo.app.svc.cluster.local:80");
        for index in 0..65 {
            many = many.header(format!("x-{index}"), "1");
        }
        let request = many.body(()).expect("a request");
        assert_eq!(describe(client.request(request).await), "431");
        let large = Request::connect("echo.app.svc.cluster.local:80")
            .header("baggage", "x".repeat(17 * 1024))
            .body(())
            .expect("a request");
        assert_eq!(describe(client.request(large).await), "431");
        assert_eq!(gateway.tunnels("too_many_fields").await, 2.0);
        let again = answer(&client, "echo.app.svc.cluster.local:80").await;
        assert_eq!(again, StatusCode::SERVICE_UNAVAILABLE.as_str(), "the connection goes on");
        assert_eq!(gateway.tunnels("no_endpoint").await, 1.0);
    });
}

#[test]
fn what_http_itself_forbids_is_reset_and_the_connection_goes_on() {
    const PROTOCOL_ERROR: u8 = 1;
    run(async {
        let gateway = Gateway::start(&Settings::new(Net::new(), identities())).await;
        let mut peer = RawPeer::connect(&gateway).await;
        let authorities: [&[u8]; 12] = [
            b"",
            b"echo app:80",
            b"echo\0.app:80",
            b"echo\x7f.app:80",
            "\u{e9}cho.app:80".as_bytes(),
            b"ec%68o.app:80",
            b"fe80::1:80",
            b"echo.app:80:90",
            b"echo.app/x:80",
            b"echo.app?x:80",
            b"echo.app#x:80",
            b"echo.app\\x:80",
        ];
        let mut stream = 1;
        for authority in authorities {
            peer.headers(stream, &[(":method", b"CONNECT"), (":authority", authority)]).await;
            let text = String::from_utf8_lossy(authority);
            assert_eq!(peer.ending(stream).await, Ending::Reset(PROTOCOL_ERROR), "{text:?}");
            stream += 2;
        }
        for extra in [(":path", b"/".as_slice()), (":scheme", b"https".as_slice())] {
            let fields =
                [(":method", b"CONNECT".as_slice()), extra, (":authority", b"echo.app:80")];
            peer.headers(stream, &fields).await;
            assert_eq!(peer.ending(stream).await, Ending::Reset(PROTOCOL_ERROR), "{extra:?}");
            stream += 2;
        }
        peer.headers(stream, &[(":method", b"CONNECT"), (":authority", b"echo.app:80")]).await;
        assert_eq!(peer.ending(stream).await, Ending::Answered, "the connection goes on");
    });
}

#[test]
fn stream_257_is_refused_and_the_256_go_on() {
    const REFUSED_STREAM: u8 = 7;
    run(async {
        let net = Net::new();
        let gateway =
            Gateway::start(&Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")])).await;
        let _endpoint = Endpoint::echo(net.listen(11, 9000).await);
        let mut peer = RawPeer::connect(&gateway).await;
        let connect: [(&str, &[u8]); 2] =
            [(":method", b"CONNECT"), (":authority", b"echo.global:80")];
        for index in 0..256 {
            peer.headers(1 + 2 * index, &connect).await;
            assert_eq!(peer.ending(1 + 2 * index).await, Ending::Answered, "stream {index}");
        }
        peer.headers(513, &connect).await;
        assert_eq!(peer.ending(513).await, Ending::Reset(REFUSED_STREAM));
        assert_eq!(gateway.metric("strait_tunnels_open").await, 256.0);
    });
}
