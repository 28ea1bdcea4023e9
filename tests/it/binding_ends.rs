//! Ends of connections of bindings that a gateway cancels, or that no longer proves itself.

use strait::tls::{self, TrustedDomain};
use strait::tools::hbone;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinSet;

use crate::bindings::{Workload, bound, connect, east, echoes, is_rejected, is_reset};
use crate::support::{Gateway, Net, identities, replace, run, until};
use crate::transit::{WEST_GATEWAY, start_west, west};

#[test]
fn a_tunnel_that_the_gateway_cancels_after_its_own_end_is_complete() {
    run(async {
        let (net, here) = (Net::new(), Net::new());
        let domain = TrustedDomain { name: "east.local".into(), issuers: None, roots: None };
        let material = identities().material(&identities().leaf(WEST_GATEWAY));
        let tls = tls::endpoint_server_config(&material, vec![domain]).expect("a server");
        let listener = net.listen(1, 15008).await;
        let mut gateway = JoinSet::new();
        gateway.spawn(hbone::serve(listener, tls, |incoming| async move {
            let mut tunnel = incoming.tunnel;
            tunnel.write_all(b"bye").await.expect("an open tunnel");
            tunnel.shutdown().await.expect("an open tunnel");
            // The reset would revoke bytes that have not left yet.
            tunnel.read_u8().await.expect("a byte");
            tunnel.reset(h2::Reason::CANCEL);
        }));
        let acceptor = Gateway::start(&east(here, &[net], ", inner: tcp")).await;
        let mut client = connect(bound(here)).await;
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).await.expect("a clean end");
        assert_eq!(answer, b"bye");
        client.write_all(b"x").await.expect("an open connection");
        let ends = async || acceptor.tunnels_by_reason().await;
        let all =
            |ends: &std::collections::BTreeMap<String, f64>| ends.values().sum::<f64>() == 1.0;
        until("an end", ends, all).await;
        assert_eq!(acceptor.tunnels("completed").await, 1.0);
    });
}

#[test]
fn a_connection_through_a_gateway_that_loses_its_identity_in_the_configuration_is_reset() {
    run(async {
        let (net, here) = (Net::new(), Net::new());
        let _workload = Workload::start(net, "spiffe://west.local/ns/app/sa/echo", false).await;
        let _donor = start_west(&west(net, &[(11, 1, "HBONE")])).await;
        let acceptor = Gateway::start(&east(here, &[net], "")).await;
        let mut client = connect(bound(here)).await;
        echoes(&mut client).await;
        let file = acceptor.file("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        assert!(text.contains(WEST_GATEWAY));
        let other = "spiffe://west.local/ns/istio-system/sa/other";
        replace(&file, &text.replace(WEST_GATEWAY, other));
        is_reset(&mut client).await;
        assert_eq!(acceptor.tunnels("revoked").await, 1.0);
        acceptor.logged("is not an identity of this gateway").await;
        is_rejected(bound(here)).await;
        let untrusted = async || acceptor.tunnels("gateway_untrusted").await;
        until("untrusted", untrusted, |&count| count == 1.0).await;
    });
}
