//! Gateway started as Istio starts it.

use std::path::Path;

use prost_types::value::Kind;
use strait::xds::store::ADDRESS;

use crate::istio::asks;
use crate::support::istiod::Istiod;
use crate::support::wds::{HOSTNAME, SERVICE, bytes, service, workload};
use crate::support::{Endpoint, Net, identities, pod, replace, run, until};

#[test]
fn a_pod_gets_its_certificate_and_services_and_carries_tunnels_without_a_file() {
    run(async {
        let net = Net::new();
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let istiod = Istiod::default();
        istiod.put(ADDRESS, SERVICE, &service());
        istiod.put(ADDRESS, "a", &workload("a", bytes(net.ip(11))));
        istiod.export(SERVICE);
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let mut gateway = pod::spawn(net, "");
        gateway.ready().await;
        asks(&gateway).await.expect("a tunnel");

        let ignored = "ignored arguments: --domain --serviceCluster --proxyComponentLogLevel";
        gateway.logged(ignored).await;
        let calls = istiod.calls();
        let reported = |name| calls[0].get(name).and_then(|value| value.to_str().ok());
        assert_eq!((reported("clusterid"), reported("x-tenant")), (Some("east"), Some("blue")));
        let node = istiod.requests().into_iter().find_map(|request| request.node);
        let id = node.expect("a node").id;
        let domain = "istio-system.svc.cluster.local";
        assert_eq!(id, format!("waypoint~10.0.0.9~eastwest-7d9f.istio-system~{domain}"));
        let state = async || gateway.file("var/lib/istio/data/strait-mesh").exists();
        until("the cache", state, |&exists| exists).await;
    });
}

#[test]
fn the_file_over_a_pod_is_watched() {
    run(async {
        let net = Net::new();
        let istiod = Istiod::default();
        istiod.put(ADDRESS, SERVICE, &service());
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        istiod.put(ADDRESS, "a", &workload("a", bytes(net.ip(11))));
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let mut gateway = pod::spawn(net, "");
        gateway.ready().await;
        asks(&gateway).await.expect_err("nothing is exported");

        let write = |text: &str| {
            let text = format!("{}{text}", pod::addresses(net));
            replace(Path::new(&gateway.file("strait.yaml")), &text);
        };
        write("exposure: {services: [{service: nowhere}]}\nlog: {x: 1}\n");
        gateway.logged("unknown key `x` in `log`").await;
        write(&format!(
            "exposure: {{services: [{{service: {HOSTNAME}, to: [{{cluster: west.local}}]}}]}}\n"
        ));
        until("the exposure", async || asks(&gateway).await, Result::is_ok)
            .await
            .expect("a tunnel");
    });
}

#[test]
fn istiod_receives_what_the_file_over_a_pod_says() {
    run(async {
        let net = Net::new();
        let istiod = Istiod::default();
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let file = "gateway: {cluster: mine}\nidentity: {namespace: app, service_account: other}\n";
        let _gateway = pod::spawn(net, file);
        let received = async || istiod.requests().into_iter().find_map(|request| request.node);
        let node = until("a node", received, Option::is_some).await.expect("a node");
        assert!(node.id.contains(".app~app.svc."), "{}", node.id);
        let metadata = node.metadata.expect("metadata").fields;
        let reported = |key: &str| match metadata.get(key).and_then(|value| value.kind.as_ref()) {
            Some(Kind::StringValue(text)) => text.clone(),
            other => panic!("{key}: {other:?}"),
        };
        assert_eq!(reported("CLUSTER_ID"), "mine");
        assert_eq!(
            (reported("NAMESPACE"), reported("SERVICE_ACCOUNT")),
            ("app".into(), "other".into())
        );
        let calls = istiod.calls();
        let cluster = calls[0].get("clusterid").expect("a cluster");
        assert_eq!(cluster.to_str().ok(), Some("mine"));
    });
}

#[test]
fn istiods_roots_may_be_a_text_or_the_systems() {
    run(async {
        let net = Net::new();
        let istiod = Istiod::default();
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let variables = [
            ("CA_ROOT_CA", &*identities().root),
            ("XDS_ROOT_CA", "SYSTEM"),
            ("SSL_CERT_FILE", "var/run/secrets/istio/root-cert.pem"),
        ];
        let mut gateway = pod::spawn_with(net, "", &variables);
        gateway.ready().await;
    });
}
