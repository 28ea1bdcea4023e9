//! Warnings about grants of transit, by which a peer may reach more than directly.

use std::collections::BTreeSet;

use crate::config::{Config, ExposedService, Link};
use crate::snapshot::{Service, Snapshot};
use crate::wire::Transit;

/// Returns a warning for each grant that widens the reach of peers. Gateways of other networks
/// authorize this gateway and not the peer.
pub(super) fn check_grants(config: &Config, snapshot: &Snapshot) -> Vec<String> {
    let entries = config.exposure.services.iter();
    let granting = entries.filter(|entry| entry.transit > Transit::Off);
    let findings = granting.flat_map(|entry| {
        let at = format!("{}:{}: warning", config.file.display(), entry.line);
        let service = snapshot.service_by_name(&entry.service.host);
        let unlinked = service.map(|service| unlinked(config, entry, service));
        let what = of_every_cluster(entry).into_iter();
        let what = what.chain(unlinked.into_iter().flatten());
        what.map(move |what| format!("{at}: {what}"))
            .collect::<Vec<_>>()
    });
    findings.collect()
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
        let link = Link {
            from: (*from).to_owned(),
            to: (*to).to_owned(),
        };
        to.is_empty() || from == to || links.contains(&link)
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
        let (config, findings) = Config::parse(Path::new("c"), &format!("{CONFIG}{rest}"));
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
}
