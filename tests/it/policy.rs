//! Istio's authorization policies at a gateway that a control plane programs.

use prost::Message as _;
use strait::grpc::security::{self, Action, Authorization, Scope};
use strait::grpc::workload::Address;
use strait::tools::hbone::Tunnel;
use strait::xds::store::{ADDRESS, AUTHORIZATION};

use crate::istio::spawn;
use crate::support::istiod::{Behaviour, Istiod, NAME, Serving};
use crate::support::wds::{SERVICE, bytes, changed, policy, service};
use crate::support::{
    CLIENT, ECHO, Endpoint, Gateway, Net, Settings, broken, echoes, identities, replace, run,
    try_echo, until,
};

/// Client of another namespace than [`CLIENT`].
const OTHER: &str = "spiffe://west.local/ns/bank/sa/teller";
/// Status of a tunnel that policies reject.
const REFUSED: &str = "401";

fn deny(of: &str) -> Authorization {
    policy("p", Scope::Namespace, Action::Deny, of)
}

/// The workload `a`, which these policies select.
fn selected(net: Net, policies: &[&str]) -> Address {
    changed("a", bytes(net.ip(11)), |workload| {
        workload.authorization_policies = policies.iter().map(|&name| name.to_owned()).collect();
    })
}

/// A gateway, the control plane and the one endpoint of its service.
struct Mesh {
    gateway: Gateway,
    istiod: Istiod,
    serving: Option<Serving>,
    net: Net,
    _endpoint: Endpoint,
}

impl Mesh {
    async fn start(mode: &str, policies: &[Authorization]) -> Self {
        let net = Net::new();
        let endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let mut settings = Settings::new(net, identities());
        settings.more += &policy_line(mode);
        // A removed policy goes at once, also after a reconnect.
        let mut gateway = spawn(&settings, &format!("{NAME}, hold: 0s"));
        let istiod = Istiod::default();
        istiod.enable_dry_run();
        istiod.put(ADDRESS, SERVICE, &service());
        istiod.put(ADDRESS, "a", &selected(net, &[]));
        for policy in policies {
            let name = format!("app/{}", policy.name);
            istiod.put(AUTHORIZATION, &name, policy);
        }
        let serving = Some(istiod.serve(net.address(2, 15012), identities()).await);
        gateway.ready().await;
        Self { gateway, istiod, serving, net, _endpoint: endpoint }
    }

    async fn tunnel(&self, id: &str) -> Result<Tunnel, String> {
        loop {
            let client = self.gateway.client_as(identities(), id).await;
            let tunnel = client.tunnel(ECHO).await;
            // Without its handle the connection goes on as long as the tunnel does.
            let mut tunnel = tunnel.map_err(|error| error.to_string())?;
            // A change while the tunnel was opened revokes it at once.
            if try_echo(&mut tunnel).await.is_ok() {
                tokio::spawn(client.wait_closed());
                return Ok(tunnel);
            }
        }
    }

    async fn asks(&self, id: &str) -> Result<(), String> {
        self.tunnel(id).await.map(drop)
    }

    /// Waits until this peer is rejected. A tunnel that a change revokes while it opens is
    /// answered otherwise, and a policy decides the next one.
    async fn refuses(&self, id: &str) {
        let is_refusal =
            |asked: &Result<(), String>| asked.as_ref().is_err_and(|why| why.contains(REFUSED));
        until("a refusal", async || self.asks(id).await, is_refusal).await.expect_err("a refusal");
    }

    async fn admits(&self, id: &str) {
        let requested = until("a tunnel", async || self.asks(id).await, Result::is_ok).await;
        requested.expect("a tunnel");
    }

    async fn counted(&self, outcome: &str) -> f64 {
        let name = format!("strait_policy_refusals_total{{outcome=\"{outcome}\"}}");
        self.gateway.metric(&name).await
    }

    /// Changes the mode while it runs.
    fn switch(&self, from: &str, to: &str) {
        let file = self.gateway.file("strait.yaml");
        let text = std::fs::read_to_string(&file).expect("a configuration");
        let (from, to) = (policy_line(from), policy_line(to));
        assert!(text.contains(&from));
        replace(&file, &text.replace(&from, &to));
    }
}

fn policy_line(mode: &str) -> String {
    format!("policy: {{istio: {mode}}}\n")
}

#[test]
fn allow_and_deny_decide_under_enforce_and_audit_lets_through() {
    run(async {
        let allow = policy("allow", Scope::Namespace, Action::Allow, "shop");
        let mesh = Mesh::start("enforce", &[allow]).await;
        mesh.asks(CLIENT).await.expect("it is allowed");
        mesh.refuses(OTHER).await;
        assert!(mesh.gateway.tunnels("policy_denied").await > 0.5);
        mesh.gateway.logged("app/allow").await;

        mesh.istiod.put(AUTHORIZATION, "app/p", &deny("shop"));
        mesh.refuses(CLIENT).await;
        mesh.gateway.logged("app/p").await;

        let before = mesh.counted("audited").await;
        mesh.switch("enforce", "audit");
        mesh.admits(CLIENT).await;
        mesh.admits(OTHER).await;
        assert!(mesh.counted("audited").await > before + 1.5);
        mesh.switch("audit", "off");
        let still = async || {
            let before = mesh.counted("audited").await;
            mesh.admits(OTHER).await;
            mesh.counted("audited").await > before + 0.5
        };
        until("nobody to look", still, |looks| !looks).await;
        mesh.switch("off", "enforce");
        mesh.refuses(OTHER).await;
    });
}

#[test]
fn a_dry_run_is_counted_and_refuses_nothing() {
    run(async {
        let logs = Authorization { dry_run: true, ..deny("shop") };
        let mesh = Mesh::start("enforce", &[logs]).await;
        mesh.asks(CLIENT).await.expect("it only logs");
        assert!((mesh.counted("dry_run").await - 1.0).abs() < 0.5);
        assert!(mesh.counted("refused").await < 0.5);
        mesh.gateway.logged("outcome=\"dry_run\"").await;

        // A change causes a new evaluation of open tunnels, which are not counted again.
        let mut open = mesh.tunnel(CLIENT).await.expect("it only logs");
        let before = mesh.counted("dry_run").await;
        let of_others = policy("q", Scope::Namespace, Action::Deny, "bank");
        mesh.istiod.put(AUTHORIZATION, "app/q", &of_others);
        mesh.refuses(OTHER).await;
        let mut lost = mesh.tunnel(CLIENT).await.expect("it only logs");
        let deny = policy("r", Scope::Namespace, Action::Deny, "shop");
        mesh.istiod.put(AUTHORIZATION, "app/r", &deny);
        for tunnel in [&mut open, &mut lost] {
            broken(tunnel).await;
        }
        assert!((mesh.counted("dry_run").await - before - 1.0).abs() < 0.5);
    });
}

#[test]
fn nothing_is_let_in_while_the_policies_are_withheld() {
    run(async {
        let net = Net::new();
        let _endpoint = Endpoint::echo(net.listen(11, 15008).await);
        let mut settings = Settings::new(net, identities());
        settings.more += &policy_line("enforce");
        let mut gateway = spawn(&settings, NAME);
        let istiod = Istiod::default();
        istiod.set_behaviour(Behaviour::OmitsType(AUTHORIZATION));
        istiod.put(ADDRESS, SERVICE, &service());
        istiod.put(ADDRESS, "a", &selected(net, &[]));
        let serving = istiod.serve(net.address(2, 15012), identities()).await;
        let received = async || gateway.http(15000, "GET", "/config_dump").await.1;
        until("addresses", received, |dump| dump.contains("\"uid\": \"a\"")).await;
        let (status, pending) = gateway.readiness().await;
        assert!(status == 500 && pending.contains("authorizations"), "{pending}");
        let asks = async || {
            let client = gateway.client_as(identities(), CLIENT).await;
            let requested = client.tunnel(ECHO).await;
            requested.map(drop).map_err(|error| error.to_string())
        };
        for _ in 0..3 {
            let why = asks().await.expect_err("the policies may refuse it");
            assert!(why.contains(REFUSED), "{why}");
        }
        gateway.logged("authorization policies not received yet").await;
        istiod.set_behaviour(Behaviour::Normal);
        serving.stop().await;
        gateway.logged("no stream to the control plane").await;
        let _serving = istiod.serve(net.address(2, 15012), identities()).await;
        until("a tunnel", asks, Result::is_ok).await.expect("a tunnel");
        gateway.ready().await;
    });
}

#[test]
fn a_deny_resets_the_open_tunnels_that_it_matches_and_no_others() {
    run(async {
        let mesh = Mesh::start("enforce", &[]).await;
        let mut kept = mesh.tunnel(OTHER).await.expect("a tunnel");
        for (name, change) in [("a policy", AUTHORIZATION), ("what selects one", ADDRESS)] {
            let mut lost = mesh.tunnel(CLIENT).await.expect(name);
            match change {
                AUTHORIZATION => mesh.istiod.put(AUTHORIZATION, "app/p", &deny("shop")),
                _ => mesh.istiod.put(ADDRESS, "a", &selected(mesh.net, &["app/q"])),
            }
            let code = broken(&mut lost).await;
            assert_eq!(code, Some(h2::Reason::INTERNAL_ERROR), "{name}");
            echoes(&mut kept).await;
            // For the next step: nothing is rejected, and a policy matches.
            let q = policy("q", Scope::WorkloadSelector, Action::Deny, "shop");
            mesh.istiod.put(AUTHORIZATION, "app/q", &q);
            mesh.istiod.remove(AUTHORIZATION, "app/p");
            if change == AUTHORIZATION {
                mesh.admits(CLIENT).await;
            }
        }
        assert!((mesh.gateway.tunnels("revoked").await - 2.0).abs() < 0.5);
        // Each line of the access log names the policy that ended its tunnel.
        let ends = async || {
            let log = mesh.gateway.log();
            let lines = log.lines().filter(|line| line.contains("revoked"));
            let named = |name| lines.clone().any(|line| line.contains(name));
            named("app/p") && named("app/q")
        };
        until("both ends", ends, |both| *both).await;
    });
}

#[test]
fn a_deny_resets_tunnels_of_a_workload_whose_number_of_addresses_changes() {
    run(async {
        let mesh = Mesh::start("enforce", &[]).await;
        let q = policy("q", Scope::WorkloadSelector, Action::Deny, "shop");
        mesh.istiod.put(AUTHORIZATION, "app/q", &q);
        let dual = |policies: &[&str]| {
            changed("a", bytes(mesh.net.ip(11)), |workload| {
                workload.addresses.push(vec![127, 255, 0, 1].into());
                let names = policies.iter().map(|&name| name.to_owned());
                workload.authorization_policies = names.collect();
            })
        };
        let single = |policies: &[&str]| selected(mesh.net, policies);
        let received = async || mesh.gateway.http(15000, "GET", "/config_dump").await.1;
        for (before, after) in [(single(&[]), dual(&["app/q"])), (dual(&[]), single(&["app/q"]))] {
            mesh.istiod.put(ADDRESS, "a", &before);
            let is_dual = before == dual(&[]);
            let is_received = |dump: &String| dump.contains("127.255.0.1") == is_dual;
            until("the workload", received, is_received).await;
            let tunnel = async || mesh.tunnel(CLIENT).await;
            let opened = until("a tunnel", tunnel, Result::is_ok).await;
            let mut lost = opened.expect("a tunnel");
            mesh.istiod.put(ADDRESS, "a", &after);
            assert_eq!(broken(&mut lost).await, Some(h2::Reason::INTERNAL_ERROR));
        }
        assert!((mesh.gateway.tunnels("revoked").await - 2.0).abs() < 0.5);
    });
}

/// Returns a policy of the namespace with a field of a newer version.
fn newer() -> Vec<u8> {
    [deny("bank").encode_to_vec(), vec![0x98, 0x06, 0x01]].concat()
}

#[test]
fn a_policy_that_cannot_be_read_refuses_what_it_covers_until_it_is_gone() {
    run(async {
        let mut mesh = Mesh::start("enforce", &[]).await;
        mesh.asks(CLIENT).await.expect("a tunnel");
        mesh.istiod.put_all(AUTHORIZATION, &[("app/p", newer())]);
        mesh.refuses(CLIENT).await;
        let rejections = mesh.istiod.rejections();
        let want = "app/p: authorization: unknown field 99";
        assert_eq!(rejections, [want]);
        mesh.istiod.remove(AUTHORIZATION, "app/p");
        mesh.admits(CLIENT).await;

        // Removed while the control plane was disconnected.
        mesh.istiod.put_all(AUTHORIZATION, &[("app/p", newer())]);
        mesh.refuses(CLIENT).await;
        drop(mesh.serving.take());
        mesh.gateway.logged("no stream to the control plane").await;
        mesh.istiod.remove(AUTHORIZATION, "app/p");
        mesh.refuses(CLIENT).await;
        let address = mesh.net.address(2, 15012);
        mesh.serving = Some(mesh.istiod.serve(address, identities()).await);
        mesh.admits(CLIENT).await;

        // A version that can be read replaces the placeholder that rejects.
        mesh.istiod.put_all(AUTHORIZATION, &[("app/p", newer())]);
        mesh.refuses(CLIENT).await;
        mesh.istiod.put(AUTHORIZATION, "app/p", &deny("bank"));
        mesh.admits(CLIENT).await;
        mesh.refuses(OTHER).await;
    });
}

#[test]
fn what_the_gateway_does_not_know_is_left_to_the_destination() {
    run(async {
        let with_port = |mut from: Authorization, port| {
            from.rules[0].clauses[0].matches[0].destination_ports = vec![port];
            from
        };
        // With the address of the tunnel, and with another one.
        let with_source = |mut from: Authorization, address: [u8; 4]| {
            let net = security::Address { address: address.to_vec().into(), length: 8 };
            from.rules[0].clauses[0].matches[0].source_ips = vec![net];
            from
        };
        let allow = policy("allow", Scope::Global, Action::Allow, "shop");
        let from_here = policy("q", Scope::Namespace, Action::Deny, "shop");
        let policies = [
            with_source(with_port(allow, 9090), [10, 0, 0, 0]),
            with_port(deny("shop"), 9091),
            with_source(from_here, [127, 0, 0, 0]),
        ];
        let mesh = Mesh::start("enforce", &policies).await;
        mesh.asks(CLIENT).await.expect("it may be allowed");
        mesh.refuses(OTHER).await;
    });
}
