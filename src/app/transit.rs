//! Warnings about grants of transit, by which a peer may reach more than directly, and about
//! gateways of other networks that cannot be verified.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use crate::config::{
    Audience, Config, ExposedService, HostPort, Link, TransitRule, parse_identity,
};
use crate::labels::join_first;
use crate::snapshot::{RemoteGateway, Service, Snapshot};
use crate::wire::Transit;
use crate::yaml::{Finding, Place};

/// Maximum number of services in a finding.
const NAMED_MAX: usize = 20;

/// Returns a warning for each entry that widens the reach of peers. Gateways of other networks
/// authorize this gateway and not the peer, unless they trust its `x-strait-source`.
pub(super) fn check_grants(config: &Config, snapshot: &Snapshot) -> Vec<Finding> {
    let findings = config.exposure.services.iter().flat_map(|entry| {
        let mut what = unlisted_gateways(config, entry);
        let service = snapshot.service_by_name(&entry.service.host);
        let default = service.map(|of| snapshot.default_transit(&of.hostname));
        let transit = entry.transit.or(default).unwrap_or_default();
        if transit > Transit::Off {
            what.extend(of_every_cluster(entry, transit));
            let from = entry.to.iter().filter_map(|to| to.cluster.as_deref());
            if let Some(service) = service {
                let what_of = (transit, &entry.service);
                what.extend(unlinked(config, from, what_of, service));
            }
        }
        let what = what.into_iter();
        what.map(move |what| Finding::warning(&entry.line.0, what, ""))
    });
    let rules = config.exposure.transit.iter().filter_map(|rule| reachable(rule, snapshot));
    findings.chain(rules).collect()
}

/// Returns the finding that lists the services that a rule opens to other networks. Those of a
/// control plane are known only at run time.
fn reachable(rule: &TransitRule, snapshot: &Snapshot) -> Option<Finding> {
    let is_its = |service: &&Arc<Service>| {
        let host = &service.hostname;
        let ports = service.definition.ports.keys().copied();
        snapshot.transit_rule(host) == Some(rule)
            && snapshot.is_exposed_to_any(host, ports, |entry| {
                entry.transit.is_none() && !entry.to.is_empty()
            })
    };
    let services = snapshot.services.sorted().into_iter();
    let services = services.filter(|of| !of.other_networks.is_empty());
    let names: Vec<_> = services
        .filter(is_its)
        .map(|service| {
            let networks = service.other_networks.join(", ");
            format!("{} (network {networks})", service.hostname)
        })
        .collect();
    if rule.transit == Transit::Off || names.is_empty() {
        return None;
    }
    Some(opened_by(rule, &join_first(names, NAMED_MAX)))
}

/// Returns the findings of rules under a control plane, whose services are known only at run time.
pub(super) fn received(config: &Config) -> Vec<Finding> {
    let rules = config.exposure.transit.iter().filter(|rule| rule.transit > Transit::Off);
    let services = "the exposed and exported services of the control plane; `strait status` lists \
                    them";
    rules.map(|rule| opened_by(rule, services)).collect()
}

fn opened_by(rule: &TransitRule, services: &str) -> Finding {
    let what = format!(
        "`exposure.transit` lets peers reach other networks through this gateway, whose gateways \
         authorize this one and not the peer, for {services}"
    );
    Finding::warning(&rule.line.0, what, "")
}

/// Returns a finding for each gateway of another network that the entry admits, but not as one of
/// everyone, and whose first peers are not evaluated.
fn unlisted_gateways(config: &Config, entry: &ExposedService) -> Vec<String> {
    let identities = config.networks.iter().flat_map(|network| {
        network.identities.iter().map(|identity| (network.cluster.as_deref(), identity))
    });
    let unlisted = identities.filter(|(_, identity)| !config.trust.gateways.contains(identity));
    let is_admitted = |(cluster, identity): &(Option<&str>, &String)| {
        parse_identity(identity).is_some_and(|[domain, namespace, account]| {
            let mut domains = config.trust.domains.iter();
            let of_domain = || domains.find(|of| *of.name == *domain).map(|of| &*of.cluster);
            let cluster = cluster.or_else(of_domain);
            let mut to = entry.to.iter().filter(|to| !to.anyone);
            to.any(|to| admits(to, cluster, (namespace, account)))
        })
    };
    let admitted = unlisted.filter(is_admitted).map(|(_, identity)| identity);
    let admitted: BTreeSet<_> = admitted.collect();
    let finding = |identity| {
        format!(
            "{} is exposed to the gateway {identity}, whatever peer is behind it; write the \
             identity into `trust.gateways`, and its peers into `to`",
            entry.service
        )
    };
    admitted.into_iter().map(finding).collect()
}

/// Returns whether an audience has a peer of this cluster, namespace and service account. A cluster
/// that the configuration does not name may be any.
fn admits(to: &Audience, cluster: Option<&str>, (namespace, account): (&str, &str)) -> bool {
    let named = to.cluster.as_deref().zip(cluster);
    named.is_none_or(|(only, cluster)| only == cluster) && to.has_account(namespace, account)
}

/// Returns a finding for each gateway whose certificate nothing can prove, so that no tunnel opens
/// through it. The addresses of hostnames are known only at run time.
pub(super) fn unverifiable_gateways(file: &Path, snapshot: &Snapshot) -> Vec<Finding> {
    let place = Place { file: file.to_owned(), line: 0 };
    let unknown = snapshot.remote_gateways().filter(|(_, of)| !of.is_verifiable());
    let finding = |(address, of): (SocketAddr, Arc<RemoteGateway>)| {
        let network = &of.network;
        let what = format!(
            "the gateway {address} of network {network} is not used: neither its cluster nor an \
             identity is known"
        );
        let how = format!(
            "one `clusterId` into the workloads behind it, or `{{name: {network}, cluster: \
             CLUSTER}}` into `networks`"
        );
        Finding::warning(&place, what, &how)
    };
    unknown.map(finding).collect()
}

/// Returns a finding if the entry admits peers of every cluster.
fn of_every_cluster(entry: &ExposedService, transit: Transit) -> Option<String> {
    let mut to = entry.to.iter();
    let is_open = to.any(|to| to.anyone || to.cluster.is_none());
    is_open.then(|| {
        format!(
            "`transit: {transit}` of {} holds for peers of every cluster, whatever other networks \
             expose to them; write `cluster` into each entry of `to`",
            entry.service
        )
    })
}

/// Returns a finding for each pair of clusters without a link that an entry connects, by the
/// clusters of its peers, its transit and its name of the service.
fn unlinked<'a>(
    config: &Config,
    from: impl Iterator<Item = &'a str>,
    (transit, name): (Transit, &HostPort),
    service: &Service,
) -> Vec<String> {
    let Some(links) = &config.links else {
        return Vec::new();
    };
    let sets = service.transit_ports.values();
    let endpoints = sets.flat_map(|sets| &sets.always.endpoints);
    let gateways = endpoints.filter_map(|one| one.remote.as_ref());
    let clusters: BTreeSet<&str> = gateways.map(|remote| &*remote.cluster).collect();
    let pairs = from.flat_map(|from| clusters.iter().map(move |to| (from, *to)));
    let is_linked = |(from, to): &(&str, &str)| {
        let is_its = |link: &Link| link.from == *from && link.to == *to;
        to.is_empty() || *from == *to || links.iter().any(is_its)
    };
    let unlinked = pairs.filter(|pair| !is_linked(pair)).map(|(from, to)| {
        format!(
            "`transit: {transit}` of {name} lets cluster {from} reach cluster {to}, to which it \
             has no link; write `{{from: {from}, to: {to}}}` into `links`, or remove `transit`"
        )
    });
    unlinked.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::builder::{Change, build};
    use crate::snapshot::mesh::{Mesh, Service, Template, Workload};
    use crate::xds::file;
    use crate::yaml::Findings;

    const CONFIG: &str = r#"gateway: {cluster: east}
identity: {kind: spiffe, socket: "unix:///dev/null"}
trust: {domains: [{name: east.local, cluster: east}, {name: west.local, cluster: west}]}
listeners: [{name: a, bind: "127.0.0.1:0"}]
discovery: {kind: file, path: /dev/null}
networks: [{name: north, cluster: north, gateways: ["192.0.2.1:15008"]}]
"#;

    fn lines(findings: Vec<Finding>) -> Vec<String> {
        Findings(findings).lines()
    }

    fn warnings(rest: &str) -> Vec<String> {
        warnings_of(&format!("{CONFIG}{rest}"))
    }

    fn warnings_of(text: &str) -> Vec<String> {
        let (config, findings) = Config::parse(Path::new("c"), text);
        let config = config.unwrap_or_else(|| panic!("{findings}"));
        let service = Service {
            namespace: "app".into(),
            hostname: "echo.app".into(),
            ports: [(80, 80)].into(),
            ..Service::default()
        };
        let template = Template { network: "north".into(), ..Template::default() };
        let workload = Workload {
            uid: "north-1".into(),
            healthy: true,
            capacity: 1,
            services: [("app/echo.app".into(), [(80, 80)].into())].into(),
            template: template.into(),
            ..Workload::default()
        };
        let change = Change {
            mesh: Some((Mesh::new([service], [workload]), "east".into())),
            ..Change::of(&config)
        };
        lines(check_grants(&config, &build(&Snapshot::default(), change)))
    }

    #[test]
    fn a_grant_that_widens_the_reach_of_peers_is_a_warning() {
        let exposed = |to: &str| {
            format!(
                "exposure: {{services: [{{service: echo.app, transit: failover, to: [{to}]}}]}}\n"
            )
        };
        let west = exposed("{cluster: west}");
        let to_east = "{from: west, to: east}";
        let linked = |links: &str| warnings(&format!("{west}links: [{links}]\n"));
        let none: [String; 0] = [];
        assert_eq!(warnings(&west), none);
        assert_eq!(warnings(&west.replace("failover", "off")), none);
        assert_eq!(linked(&format!("{to_east}, {{from: west, to: north}}")), none);
        assert_eq!(
            linked(to_east),
            ["c:7: warning: `transit: failover` of echo.app lets cluster west reach cluster \
                 north, to which it has no link; write `{from: west, to: north}` into `links`, or \
                 remove `transit`"]
        );
        for open in ["{anyone: true}", "{namespaces: [shop]}"] {
            assert_eq!(
                warnings(&exposed(open)),
                ["c:7: warning: `transit: failover` of echo.app holds for peers of every \
                     cluster, whatever other networks expose to them; write `cluster` into each \
                     entry of `to`"]
            );
        }
    }

    #[test]
    fn the_services_that_a_default_opens_to_other_networks_are_listed() {
        let of = |rules: &str, entry: &str| {
            let entry = format!("{{service: echo.app, {entry}to: [{{cluster: west}}]}}");
            warnings(&format!("exposure: {{transit: {rules}, services: [{entry}]}}\n"))
        };
        let want = |line| {
            [format!(
                "c:{line}: warning: `exposure.transit` lets peers reach other networks through \
                 this gateway, whose gateways authorize this one and not the peer, for echo.app \
                 (network north)"
            )]
        };
        assert_eq!(of("failover", ""), want(7));
        let rules = "[{namespace: app, transit: always}, {transit: off}]";
        assert_eq!(of(rules, ""), want(7));
        let none: [String; 0] = [];
        assert_eq!(of("off", ""), none);
        assert_eq!(of("failover", "transit: off, "), none);
        let rules = "[{service: echo.app, transit: off}, {transit: always}]";
        assert_eq!(of(rules, ""), none);
    }

    #[test]
    fn a_gateway_that_is_admitted_without_the_peers_behind_it_is_a_warning() {
        const IDENTITY: &str = "spiffe://north.local/ns/edge/sa/gateway";
        let config = CONFIG
            .replace("cluster: north, ", &format!("cluster: north, identities: [\"{IDENTITY}\"], "))
            .replace("west}]", "west}, {name: north.local, cluster: north}]");
        let exposed = |to: &str, gateways: &str| {
            let gateways = format!("trust: {{gateways: [{gateways}], domains");
            let config = config.replace("trust: {domains", &gateways);
            warnings_of(&format!(
                "{config}exposure: {{services: [{{service: echo.app, to: [{to}]}}]}}\n"
            ))
        };
        let none: [String; 0] = [];
        let warning = [format!(
            "c:7: warning: echo.app is exposed to the gateway {IDENTITY}, whatever peer is behind \
             it; write the identity into `trust.gateways`, and its peers into `to`"
        )];
        for to in [
            "{service_accounts: [edge/gateway]}",
            "{cluster: north, service_accounts: [edge/gateway]}",
            "{cluster: north}",
            "{namespaces: [shop, edge]}",
        ] {
            assert_eq!(exposed(to, ""), warning, "{to}");
            assert_eq!(exposed(to, &format!("\"{IDENTITY}\"")), none, "{to}");
        }
        for to in [
            "{cluster: west}",
            "{cluster: west, service_accounts: [edge/gateway]}",
            "{cluster: north, namespaces: [shop]}",
            "{service_accounts: [shop/checkout]}",
            "{anyone: true}",
        ] {
            assert_eq!(exposed(to, ""), none, "{to}");
        }
    }

    #[test]
    fn a_gateway_that_nothing_can_prove_is_a_warning() {
        let warnings = |cluster: &str| {
            let text = format!(
                "workloads: [{{uid: w, namespace: app, {cluster}network: west, workloadIps: \
                 [\"10.0.0.1\"], services: {{}}, networkGateway: {{destination: \
                 west/192.0.2.7}}}}]\n"
            );
            let text = text.replace("services: {}", "services: {\"app/echo.app\": {80: 80}}");
            let text = text
                + "services: [{name: echo, namespace: app, hostname: echo.app, vips: \
                              [\"/10.1.0.1\"], ports: {80: 80}}]\n";
            let (mesh, _) = file::parse(Path::new("m"), &text).expect("a mesh");
            let change = Change { mesh: Some((mesh, "east".into())), ..Change::default() };
            lines(unverifiable_gateways(Path::new("m"), &build(&Snapshot::default(), change)))
        };
        let want = "m: warning: the gateway 192.0.2.7:15008 of network west is not used: neither \
                    its cluster nor an identity is known; write one `clusterId` into the workloads \
                    behind it, or `{name: west, cluster: CLUSTER}` into `networks`";
        assert_eq!(warnings(""), [want]);
        assert_eq!(warnings("clusterId: west, "), [""; 0]);
    }
}
