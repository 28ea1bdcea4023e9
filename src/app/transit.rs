//! Warnings about grants of transit, by which a peer may reach more than directly.

use std::collections::BTreeSet;

use crate::config::{Config, ExposedService, Link, parse_identity};
use crate::snapshot::{Service, Snapshot};
use crate::wire::Transit;

/// Returns a warning for each entry that widens the reach of peers. Gateways of other networks
/// authorize this gateway and not the peer, unless they trust its `x-strait-source`.
pub(super) fn check_grants(config: &Config, snapshot: &Snapshot) -> Vec<String> {
    let entries = config.exposure.services.iter();
    let findings = entries.flat_map(|entry| {
        let at = format!("{}: warning", entry.line);
        let mut what = unlisted_gateways(config, entry);
        if entry.transit > Transit::Off {
            let service = snapshot.service_by_name(&entry.service.host);
            what.extend(of_every_cluster(entry));
            what.extend(
                service
                    .into_iter()
                    .flat_map(|of| unlinked(config, entry, of)),
            );
        }
        let what = what.into_iter();
        what.map(move |what| format!("{at}: {what}"))
    });
    findings.collect()
}

/// Returns a finding for each gateway of another network that the entry admits by its service
/// account, and whose first peers are not evaluated.
fn unlisted_gateways(config: &Config, entry: &ExposedService) -> Vec<String> {
    let identities = config.networks.iter().flat_map(|of| &of.identities);
    let unlisted = identities.filter(|identity| !config.trust.gateways.contains(identity));
    let is_admitted = |identity: &&String| {
        let account = parse_identity(identity).map(|[_, namespace, account]| (namespace, account));
        let accounts = entry.to.iter().flat_map(|to| &to.service_accounts);
        let mut accounts = accounts.map(|(namespace, account)| (&**namespace, &**account));
        accounts.any(|admitted| Some(admitted) == account)
    };
    let admitted: BTreeSet<_> = unlisted.filter(is_admitted).collect();
    let finding = |identity| {
        format!(
            "{} is exposed to the gateway {identity}, whatever peer is behind it; write the \
             identity into `trust.gateways`, and its peers into `to`",
            entry.service
        )
    };
    admitted.into_iter().map(finding).collect()
}

/// Returns a finding if the entry admits peers of every cluster.
fn of_every_cluster(entry: &ExposedService) -> Option<String> {
    let mut to = entry.to.iter();
    let is_open = to.any(|to| to.anyone || to.cluster.is_none());
    is_open.then(|| {
        format!(
            "`transit: {}` of {} holds for peers of every cluster, whatever other networks expose \
             to them; write `cluster` into each entry of `to`",
            entry.transit, entry.service
        )
    })
}

/// Returns a finding for each pair of clusters without a link that the entry connects.
fn unlinked(config: &Config, entry: &ExposedService, service: &Service) -> Vec<String> {
    let Some(links) = &config.links else {
        return Vec::new();
    };
    let sets = service.transit_ports.values();
    let endpoints = sets.flat_map(|sets| &sets.always.endpoints);
    let gateways = endpoints.filter_map(|one| one.remote.as_ref());
    let clusters: BTreeSet<&str> = gateways.map(|remote| &*remote.cluster).collect();
    let from = entry.to.iter().filter_map(|to| to.cluster.as_deref());
    let pairs = from.flat_map(|from| clusters.iter().map(move |to| (from, *to)));
    let is_linked = |(from, to): &(&str, &str)| {
        let is_its = |link: &Link| link.from == *from && link.to == *to;
        to.is_empty() || *from == *to || links.iter().any(is_its)
    };
    let unlinked = pairs.filter(|pair| !is_linked(pair));
    let unlinked = unlinked.map(|(from, to)| {
        format!(
            "`transit: {}` of {} lets cluster {from} reach cluster {to}, to which it has no link; \
             write `{{from: {from}, to: {to}}}` into `links`, or remove `transit`",
            entry.transit, entry.service
        )
    });
    unlinked.collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::inputs::exposure_table;
    use super::super::traffic;
    use super::*;
    use crate::snapshot::builder::{Change, build};
    use crate::snapshot::mesh::{Mesh, Service, Template, Workload};

    const CONFIG: &str = r#"gateway: {cluster: east}
identity: {kind: spiffe, socket: "unix:///dev/null"}
trust: {domains: [{name: east.local, cluster: east}, {name: west.local, cluster: west}]}
listeners: [{name: a, bind: "127.0.0.1:0"}]
discovery: {kind: file, path: /dev/null}
networks: [{name: north, cluster: north, gateways: ["192.0.2.1:15008"]}]
"#;

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
        let template = Template {
            network: "north".into(),
            ..Template::default()
        };
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
            exposure: Some(exposure_table(&config)),
            networks: Some(traffic::networks(&config)),
            ..Change::default()
        };
        check_grants(&config, &build(&Snapshot::default(), change))
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
        assert_eq!(
            linked(&format!("{to_east}, {{from: west, to: north}}")),
            none
        );
        assert_eq!(
            linked(to_east),
            [
                "c:7: warning: `transit: failover` of echo.app lets cluster west reach cluster \
                 north, to which it has no link; write `{from: west, to: north}` into `links`, or \
                 remove `transit`"
            ]
        );
        for open in ["{anyone: true}", "{namespaces: [shop]}"] {
            assert_eq!(
                warnings(&exposed(open)),
                [
                    "c:7: warning: `transit: failover` of echo.app holds for peers of every \
                     cluster, whatever other networks expose to them; write `cluster` into each \
                     entry of `to`"
                ]
            );
        }
    }

    #[test]
    fn a_gateway_that_is_admitted_without_the_peers_behind_it_is_a_warning() {
        const IDENTITY: &str = "spiffe://north.local/ns/edge/sa/gateway";
        let exposed = |account: &str, gateways: &str| {
            let to = format!("{{cluster: west, service_accounts: [{account}]}}");
            let text =
                format!("{CONFIG}exposure: {{services: [{{service: echo.app, to: [{to}]}}]}}\n");
            let text = text.replace(
                "cluster: north, ",
                &format!("cluster: north, identities: [\"{IDENTITY}\"], "),
            );
            let gateways = format!("trust: {{gateways: [{gateways}], domains");
            warnings_of(&text.replace("trust: {domains", &gateways))
        };
        let none: [String; 0] = [];
        assert_eq!(
            exposed("edge/gateway", ""),
            [format!(
                "c:7: warning: echo.app is exposed to the gateway {IDENTITY}, whatever peer is \
                 behind it; write the identity into `trust.gateways`, and its peers into `to`"
            )]
        );
        assert_eq!(exposed("edge/gateway", &format!("\"{IDENTITY}\"")), none);
        assert_eq!(exposed("shop/checkout", ""), none);
    }
}
