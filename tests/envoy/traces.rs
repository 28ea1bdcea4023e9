//! The gateway's span below that of a real Envoy, in one collector.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::process::{self, Envoy};
use crate::support::collector::{Collector, hex};
use crate::support::{
    CLIENT, ECHO, Endpoint, GATEWAY, Gateway, Net, Settings, endpoint_port, identities, run,
    try_echo, until,
};

const CLIENT_HOST: u8 = 21;
const COLLECTOR_HOST: u8 = 20;

/// Opens a tunnel through the client Envoy, and has the endpoint echo bytes.
async fn echo(net: Net) {
    let mut stream = TcpStream::connect(net.address(CLIENT_HOST, 19001)).await.expect("Envoy");
    let request = format!("CONNECT {ECHO} HTTP/1.1\r\nhost: {ECHO}\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("a request");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.expect("an answer"));
    }
    assert!(head.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&head));
    try_echo(&mut stream).await.expect("an open tunnel");
}

#[test]
fn the_span_of_a_tunnel_is_below_that_of_its_envoy() {
    run(async {
        let Some(program) = process::program("a span below that of an Envoy") else {
            return;
        };
        let (net, collector) = (Net::new(), Collector::default());
        collector.serve(net.listen(COLLECTOR_HOST, 4317).await);
        let _endpoint = Endpoint::echo(net.listen(11, endpoint_port()).await);
        let mut settings = Settings::new(net, identities()).endpoints(&[(11, 1, "TCP")]);
        let endpoint = format!("http://{}", net.address(COLLECTOR_HOST, 4317));
        // The gateway samples what its peer has sampled, and nothing else.
        settings.inside = ["env", "OTEL_SERVICE_NAME=gateway", "OTEL_BSP_SCHEDULE_DELAY=20"]
            .map(str::to_owned)
            .into_iter()
            .chain(["OTEL_TRACES_SAMPLER=parentbased_always_off".to_owned()])
            .chain([format!("OTEL_EXPORTER_OTLP_ENDPOINT={endpoint}")])
            .collect();
        let variables = [
            ("COLLECTOR", net.ip(COLLECTOR_HOST).to_string()),
            ("GATEWAY", net.ip(1).to_string()),
            ("GATEWAY_ID", GATEWAY.to_owned()),
        ];
        let leaf = identities().leaf(CLIENT);
        let client = (include_str!("traced.yaml"), &variables[..]);
        let (_gateway, _client) = tokio::join!(
            Gateway::start(&settings),
            Envoy::start(&program, net, CLIENT_HOST, &leaf, client),
        );
        echo(net).await;
        let spans = async || (collector.spans("envoy"), collector.spans("gateway"));
        let (above, below) =
            until("spans of both", spans, |(above, below)| !above.is_empty() && !below.is_empty())
                .await;
        assert_eq!(hex(&below[0].trace_id), hex(&above[0].trace_id));
        assert_eq!(hex(&below[0].parent_span_id), hex(&above[0].span_id));
    });
}
