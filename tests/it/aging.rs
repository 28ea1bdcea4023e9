//! Control plane that ends its connections by age, as gRPC servers do: GOAWAY, and later the end of
//! the connection under an open stream; and one whose GOAWAY has an error code.

use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::time::Duration;

use socket2::Socket;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::sleep;
use tonic::transport::Server;

use crate::support::istiod::{Istiod, programmed};
use crate::support::services::discovery::aggregated_discovery_service_server as ads;
use crate::support::{Net, Settings, identities, run, until};

/// Lifetime of a connection until GOAWAY, and the time from there to its end.
const AGE: Duration = Duration::from_millis(700);
const GRACE: Duration = Duration::from_millis(100);

/// GOAWAY with ENHANCE_YOUR_CALM (11), which leaves all streams open (RFC 9113 section 6.8).
const CALM: [u8; 17] = [0, 0, 8, 7, 0, 0, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 11];

/// Kind of end of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ends {
    ByAge,
    Calmed,
}

/// Serves connections in plaintext that end in this way. Ends on drop.
async fn serve(istiod: &Istiod, address: SocketAddr, ends: Ends) -> JoinSet<()> {
    let listener = TcpListener::bind(address).await.expect("a listener");
    let (istiod, mut tasks) = (istiod.clone(), JoinSet::new());
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((stream, _)) = listener.accept().await {
            let socket = stream.as_fd().try_clone_to_owned().expect("a descriptor");
            let discovery = ads::AggregatedDiscoveryServiceServer::new(istiod.clone());
            let mut server = Server::builder();
            if ends == Ends::ByAge {
                server = server.max_connection_age(AGE);
            }
            let incoming = tokio_stream::once(std::io::Result::Ok(stream));
            let serving = server.add_service(discovery).serve_with_incoming(incoming);
            connections.spawn(async move {
                tokio::spawn(serving);
                // deadline: a connection ends by age.
                sleep(AGE).await;
                let socket = Socket::from(socket);
                if ends == Ends::Calmed {
                    // The server has sent everything long ago, so no frame is cut.
                    socket.send(&CALM).expect("a frame");
                }
                // deadline: the gateway reads GOAWAY before the end.
                sleep(GRACE).await;
                let _ = socket.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    tasks
}

#[test]
fn a_connection_that_ends_by_age_is_one_line_and_no_warning() {
    run(async {
        let net = Net::new();
        let istiod = Istiod::default();
        // From here on the server requires no token; this address is not used.
        let _elsewhere = istiod.serve_plaintext(net.address(3, 15010)).await;
        let _serving = serve(&istiod, net.address(2, 15012), Ends::ByAge).await;
        // Only this kind allows plaintext; the stream is the same for both.
        let settings = Settings::new(net, identities());
        let mut gateway = programmed(&settings, "envoy", "tls: off", |_| ());
        gateway.ready().await;
        let calls = async || istiod.calls().len();
        until("three more connections", calls, |&count| count >= 4).await;
        let count = |log: &str, text: &str| log.lines().filter(|line| line.contains(text)).count();
        let log = gateway.log();
        assert_eq!(count(&log, "no stream to the control plane"), 0, "{log}");
        assert_eq!(count(&log, "connected to the control plane"), 1, "{log}");
        // The line of the last end may not be written yet.
        let again = count(&log, "reconnecting to the control plane");
        assert!((2..=4).contains(&again), "{again} lines: {log}");
    });
}

#[test]
fn goaway_with_an_error_code_is_a_failure_that_is_backed_off_from() {
    run(async {
        let net = Net::new();
        let istiod = Istiod::default();
        let _elsewhere = istiod.serve_plaintext(net.address(3, 15010)).await;
        let _serving = serve(&istiod, net.address(2, 15012), Ends::Calmed).await;
        let settings = Settings::new(net, identities());
        let mut gateway = programmed(&settings, "envoy", "tls: off", |_| ());
        gateway.ready().await;
        let count = |text: &str| gateway.log().lines().filter(|line| line.contains(text)).count();
        let calmed = async || count("by GOAWAY with ENHANCE_YOUR_CALM");
        until("three such ends", calmed, |&count| count >= 3).await;
        assert_eq!(count("reconnecting to the control plane"), 0);
        // A `Reconnect` restarts the backoff, and an `Error` doubles it.
        let ends = "istio_xds_connection_terminations_total";
        let again = gateway.metric(&format!("{ends}{{reason=\"Reconnect\"}}")).await;
        let failed = gateway.metric(&format!("{ends}{{reason=\"Error\"}}")).await;
        assert_eq!(again, 0.0);
        assert!(failed >= 3.0, "{failed}");
    });
}
