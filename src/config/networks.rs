//! The `networks` section: gateways of other networks.

use super::define::{Address, NonEmpty, repeated, section};
use super::names::HostPort;
use super::trust::WorkloadId;
use crate::yaml::{Fields, Value};

section! {
    /// Another network and its gateways.
    pub struct Network at "networks[]", check(check),
        compare(|_, read| repeated(read, |one| one.name.clone()))
    {
        /// Network, as the mesh labels it.
        name: String = required("west");
        /// Cluster that the certificate of each gateway has to lead to, which `trust` names.
        cluster: Option<String> = default(
            None,
            "that of the mesh's record of a gateway, else that of all instances behind its \
             address");
        /// Gateways, each with its HBONE port, besides those of the mesh. Hostnames are resolved,
        /// and each address is a gateway.
        gateways: Vec<HostPort> as NonEmpty<Address> = default(
            Vec::new(), "those of the mesh");
        /// Identities of which each gateway has to have one.
        identities: Vec<String> as NonEmpty<WorkloadId> = default(
            Vec::new(), "that of the mesh's record of a gateway, else any");
        /// The line of the entry, for findings that need other sections.
        line: u64 = aside(Fields::line);
    }
}

#[expect(clippy::unnecessary_wraps, reason = "a check may refuse what was read")]
fn check(network: Network, value: Value<'_>) -> Option<Network> {
    if network.cluster.is_none() && network.identities.is_empty() && !network.gateways.is_empty() {
        let what = "has gateways without `cluster` and `identities`, which are not used: no \
                    certificate can be proved to be theirs";
        value.warning(what, "`cluster: CLUSTER` or `identities: [spiffe://…]` beside them");
    }
    Some(network)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{GOOD, check, with};
    use super::*;

    #[test]
    fn every_key_is_read() {
        let text = "networks:
  - name: west
    cluster: west
    gateways: [\"east-west.example.com:15008\", \"192.0.2.1:31008\"]
    identities: [\"spiffe://west.local/ns/istio-gateways/sa/east-west\"]
";
        let (config, findings) = check(&format!("{GOOD}{text}"));
        assert_eq!(findings, "");
        let address = |text| HostPort::parse(text).expect("an address");
        let network = Network {
            name: "west".to_owned(),
            cluster: Some("west".to_owned()),
            gateways: vec![address("east-west.example.com:15008"), address("192.0.2.1:31008")],
            identities: vec!["spiffe://west.local/ns/istio-gateways/sa/east-west".to_owned()],
            line: 12,
        };
        assert_eq!(config.expect("a configuration").networks, [network]);
    }

    #[test]
    fn mistakes_have_a_remedy() {
        for (networks, want) in [
            ("[{cluster: west}]", "11: error: `networks[]` has no `name`; write `name: west`"),
            (
                "[{name: a}, {name: a}]",
                "11: error: `networks[]` has `a` twice, first on line 11; write each name once",
            ),
            (
                "[{name: a, gateways: [west.example.com]}]",
                "11: error: `networks[].gateways[]` is `west.example.com`; write a host and a \
                 port, such as `istiod.istio-system.svc:15012`",
            ),
            (
                "[{name: a, gateways: [\"192.0.2.1:15008\"]}]",
                "11: warning: `networks[]` has gateways without `cluster` and `identities`, which \
                 are not used: no certificate can be proved to be theirs; write `cluster: \
                 CLUSTER` or `identities: [spiffe://…]` beside them",
            ),
        ] {
            assert_eq!(with(&format!("networks: {networks}")), want, "{networks}");
        }
    }
}
