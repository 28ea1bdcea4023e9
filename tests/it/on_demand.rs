//! A gateway that asks its control plane for what it exposes, and for nothing else.

use std::collections::BTreeSet;

use strait::grpc::discovery::DeltaDiscoveryRequest;
use strait::grpc::workload::gateway_address::Destination;
use strait::grpc::workload::{
    Address, GatewayAddress, NamespacedHostname, PortList, Service, Workload, address,
};
use strait::xds::store::ADDRESS;

use crate::istio::{asks, spawn, spawn_with};
use crate::support::istiod::{Istiod, NAME};
use crate::support::wds::{HOSTNAME, SERVICE, bytes, ports, service, workload};
use crate::support::{ECHO, Endpoint, Gateway, Net, Settings, identities, replace, run, until};

const ON_DEMAND: &str = "istiod.istio-system.svc, on_demand: true";

fn host(name: &str) -> String {
    HOSTNAME.replace("echo", name)
}

fn key(name: &str) -> String {
    SERVICE.replace("echo", name)
}

/// A service of this name, which may be behind a waypoint of another one.
fn named(name: &str, waypoint: Option<&str>) -> Address {
    let at = |waypoint| GatewayAddress {
        destination: Some(Destination::Hostname(NamespacedHostname {
            namespace: "app".into(),
            hostname: host(waypoint),
        })),
        hbone_mtls_port: 15008,
    };
    let service = Service {
        name: name.into(),
        namespace: "app".into(),
        hostname: host(name),
        ports: ports(),
        waypoint: waypoint.map(at),
        ..Service::default()
    };
    Address {
        r#type: Some(address::Type::Service(service)),
    }
}

fn pod_of(name: &str) -> Address {
    let pod = Workload {
        uid: format!("{name}-pod"),
        namespace: "app".into(),
        services: [(key(name), PortList { ports: ports() })].into(),
        ..Workload::default()
    };
    Address {
        r#type: Some(address::Type::Workload(pod)),
    }
}

/// Services of these names with a workload each, beside the one that is asked for in tests.
fn istiod(net: Net, names: &[(&str, Option<&str>)]) -> Istiod {
    let istiod = Istiod::default();
    istiod.put(ADDRESS, SERVICE, &service());
    istiod.put(
        ADDRESS,
        "echo-pod",
        &workload("echo-pod", bytes(net.ip(11))),
    );
    for (name, waypoint) in names {
        istiod.put(ADDRESS, &key(name), &named(name, *waypoint));
        istiod.put(ADDRESS, &format!("{name}-pod"), &pod_of(name));
    }
    istiod
}

/// The resources that the gateway has, by its dump.
async fn held(gateway: &Gateway, names: &[&str]) -> BTreeSet<String> {
    let (_, dump) = gateway.http(15000, "GET", "/config_dump").await;
    let has = |name: &&&str| {
        let service = dump.contains(&host(name));
        let pod = dump.contains(&format!("{name}-pod"));
        assert_eq!(service, pod, "{name} and its workload");
        pod
    };
    let names = names.iter().filter(has);
    names.map(|name| (*name).to_owned()).collect()
}

fn of_addresses(istiod: &Istiod) -> Vec<DeltaDiscoveryRequest> {
    let mut requests = istiod.requests();
    requests.retain(|one| one.type_url == ADDRESS && one.response_nonce.is_empty());
    requests
}

#[test]
fn what_is_exposed_is_asked_for_and_forgotten_with_its_exposure() {
    const NAMES: [&str; 5] = ["echo", "exported", "way", "later", "never"];
    run(async {
        let net = Net::new();
        let istiod = istiod(
            net,
            &[
                ("exported", Some("way")),
                ("way", None),
                ("later", None),
                ("never", None),
            ],
        );
        istiod.export(&key("exported"));
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let mut gateway = spawn(&Settings::new(net, identities()), ON_DEMAND);
        gateway.ready().await;
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        asks(&gateway).await.expect("a tunnel");
        let now = async || held(&gateway, &NAMES).await;
        assert_eq!(
            now().await,
            ["echo", "exported", "way"].map(str::to_owned).into()
        );

        let file = gateway.file("strait.yaml");
        let before = std::fs::read_to_string(&file).expect("a configuration");
        let entry = format!(
            "    - service: \"{}:80\"\n      to: [{{anyone: true}}]\n",
            host("later")
        );
        replace(
            &file,
            &before.replace("  services:\n", &format!("  services:\n{entry}")),
        );
        until("what is exposed now", now, |now| now.contains("later")).await;
        // A workload that comes later comes too, and one that nobody wants does not.
        istiod.put(ADDRESS, "never-pod", &pod_of("never"));
        istiod.put(
            ADDRESS,
            "echo-pod-2",
            &workload("echo-pod-2", bytes(net.ip(12))),
        );
        let dump = async || gateway.http(15000, "GET", "/config_dump").await.1;
        until("a new workload", dump, |dump| dump.contains("echo-pod-2")).await;

        replace(&file, &before);
        istiod.unexport(&key("exported"));
        until("what is left", now, |now| now.len() == 1).await;
        assert_eq!(now().await, ["echo".to_owned()].into());
        let requests = of_addresses(&istiod);
        let gone = requests
            .iter()
            .flat_map(|one| &one.resource_names_unsubscribe);
        let gone: BTreeSet<_> = gone.filter(|name| *name != "*").cloned().collect();
        let expected = ["exported", "way", "later"];
        let expected = expected
            .iter()
            .flat_map(|name| [key(name), format!("{name}-pod")]);
        assert_eq!(gone, expected.collect());
        asks(&gateway).await.expect("a tunnel");
        assert_eq!(istiod.rejections(), [""; 0]);
    });
}

#[test]
fn a_start_from_the_cache_claims_what_it_has_and_asks_for_the_same() {
    run(async {
        let net = Net::new();
        let istiod = istiod(net, &[("never", None)]);
        let serving = istiod.serve(net.address(2, 15012), identities()).await;
        let name = format!("{NAME}, on_demand: true, cache: state");
        let settings = Settings::new(net, identities());
        let mut first = spawn(&settings, &name);
        first.ready().await;
        let state = async || std::fs::read(first.file("state")).unwrap_or_default();
        let state = until("the cache", state, |state| !state.is_empty()).await;
        serving.stop().await;
        first.signal(rustix::process::Signal::KILL);
        first.exited().await;

        let mut second = spawn_with(&settings, &name, |folder| {
            std::fs::write(folder.join("state"), state).expect("a cache");
        });
        second.ready().await;
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        asks(&second).await.expect("a tunnel without control plane");
        let (sent, asked) = (istiod.sent(), of_addresses(&istiod).len());
        // It went while nobody told the gateway.
        istiod.remove(ADDRESS, "echo-pod");
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        until("the removal", async || asks(&second).await, Result::is_err)
            .await
            .expect_err("no endpoint is left");
        let request = &of_addresses(&istiod)[asked];
        assert_eq!(request.resource_names_subscribe, [SERVICE]);
        let claimed: BTreeSet<_> = request.initial_resource_versions.keys().cloned().collect();
        assert_eq!(claimed, [SERVICE.to_owned(), "echo-pod".to_owned()].into());
        assert_eq!(istiod.sent(), sent, "nothing is sent again");
    });
}

#[test]
fn what_is_behind_an_alias_is_asked_for_by_the_name_of_its_family_that_is_known() {
    run(async {
        let net = Net::new();
        let istiod = istiod(net, &[("other", None), ("never", None)]);
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        let mut settings = Settings::new(net, identities());
        settings.exposure = "    - {service: echo.app.global, to: [{cluster: west}]}\n".to_owned();
        settings.more += "names:\n  aliases: [{name: a.alias, to: other.app.mesh.internal}]\n";
        let mut gateway = spawn(&settings, ON_DEMAND);
        gateway.ready().await;
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        asks(&gateway).await.expect("a tunnel");
        let now = async || held(&gateway, &["echo", "other", "never"]).await;
        let wanted: BTreeSet<_> = ["echo", "other"].map(str::to_owned).into();
        until("both services", now, |now| *now == wanted).await;
        let asked = of_addresses(&istiod);
        let asked: BTreeSet<_> = asked
            .iter()
            .flat_map(|one| one.resource_names_subscribe.iter().cloned())
            .collect();
        // First as it is written; then, as nobody knows it, as its family has it.
        assert!(asked.contains("app/echo.app.global") && asked.contains(SERVICE));
        assert!(asked.len() <= 8, "{asked:?}");
    });
}

#[test]
fn what_cannot_be_asked_for_is_said_by_the_check() {
    run(async {
        let net = Net::new();
        let mut settings = Settings::new(net, identities());
        settings.exposure += "    - service: \"example.com:443\"\n      to: [{anyone: true}]\n";
        let gateway = spawn(&settings, ON_DEMAND);
        gateway
            .logged("example.com is not in Kubernetes and cannot be asked for")
            .await;
        assert!(!gateway.log().contains(&format!("{ECHO} is not")));
    });
}
