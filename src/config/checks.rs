//! Checks of values of several sections together.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use super::{
    ADMIN, Discovery, Distribution, Enforcement, Link, Listener, METRICS, ProxyProtocol, READINESS,
    Sections, Trust,
};
use crate::wire::UNKNOWN_CLUSTER;
use crate::wire::label::KNOWN_LABELS;
use crate::yaml::{Kind, Node, Position, Report, Value};

impl Sections {
    /// Reports values that contradict other sections.
    pub(super) fn check(&self, root: Value<'_>, report: &Report) {
        reserved_clusters(root);
        unexpanded(root.node(), report);
        self.own_cluster(root);
        self.clusters(root);
        self.aliases(root);
        self.own_links(root);
        self.own_bindings(root);
        self.policies(root);
        self.objects(root);
        self.localities(root);
        self.proxy_headers(root);
        self.labels(root);
        overlaps(root, report);
        admin_is_local(root);
    }

    /// Warns of a name of this cluster that no entry of `trust` has. Another check warns where the
    /// own trust domain has no entry at all.
    fn own_cluster(&self, root: Value<'_>) {
        // Entries for issuers are those of peers, to which this cluster need not belong.
        let by_domain = self.trust.as_ref().filter(|trust| trust.clusters.is_empty());
        let clusters = by_domain.and_then(Trust::cluster_names);
        let (Some(clusters), Some(gateway)) = (clusters, &self.gateway) else {
            return;
        };
        for value in root.find("gateway.cluster") {
            if !clusters.contains(&gateway.cluster) {
                let what = format!(
                    "is `{}`, which is not a cluster of `trust`, so no peer is of this cluster",
                    gateway.cluster
                );
                let known: Vec<_> = clusters.iter().map(|name| format!("`{name}`")).collect();
                let how = format!("one of {}, or add it to `trust`", known.join(", "));
                value.warning(what, how);
            }
        }
    }

    fn warn_of_unlisted(&self, value: Value<'_>, what: &str, cluster: &str) {
        let why = format!(
            "{what} of `{cluster}`: no entry of `trust.domains` is for it, so its peers count as \
             the cluster `unlisted`"
        );
        value.warning(why, format!("`{{name: {cluster}}}` into `trust.domains`"));
    }

    /// Reports clusters that `trust` does not name.
    fn clusters(&self, root: Value<'_>) {
        for value in root.find("limits.clusters[].name") {
            if let Some(cluster) = value.word().filter(|cluster| self.counts_as_unlisted(cluster)) {
                self.warn_of_unlisted(value, "limits no tunnel", cluster);
            }
        }
        let Some(clusters) = self.trust.as_ref().and_then(Trust::cluster_names) else {
            return;
        };
        let audiences = root.find("exposure.services[].to[].cluster");
        let clients = root.find("bindings[].to[].cluster");
        let clients = clients.into_iter().chain(root.find("exposure.bindings.to[].cluster"));
        let consumers = root.find("names.aliases[].consumers[]");
        let weights = root.find("limits.clusters[].name");
        let named = audiences.into_iter().chain(clients).chain(consumers).chain(weights);
        for value in named.chain(bound_clusters(root)) {
            let Some(cluster) = value.word().filter(|cluster| !clusters.contains(*cluster)) else {
                continue;
            };
            let known: Vec<_> = clusters.iter().map(|name| format!("`{name}`")).collect();
            let what = format!("is `{cluster}`, which is not a cluster of `trust`");
            value.error(what, format!("one of {}", known.join(", ")));
        }
    }

    /// Reports bindings to this cluster, whose services are reached without a gateway.
    fn own_bindings(&self, root: Value<'_>) {
        let own = self.gateway.as_ref().map(|gateway| &*gateway.cluster);
        for value in bound_clusters(root) {
            if let Some(own) = own.filter(|own| value.word() == Some(own)) {
                let what = format!("is `{own}`, the cluster of this gateway");
                value.error(what, "another cluster");
            }
        }
    }

    /// Reports aliases that are never used: names of `exposure` and exposed services come first.
    fn aliases(&self, root: Value<'_>) {
        let (Some(names), Some(exposure)) = (&self.names, &self.exposure) else {
            return;
        };
        for (alias, value) in names.aliases.iter().zip(root.find("names.aliases[]")) {
            let name = &alias.name;
            let is_target = |host: &String| alias.to.iter().any(|target| target.host == *host);
            let of_target = exposure.services.iter();
            let mut of_target = of_target.filter(|one| is_target(&one.service.host));
            if let Some(subset) = &alias.subset
                && !of_target.any(|exposed| exposed.subset(subset).is_some())
            {
                let what = format!("has the subset `{subset}`, which no exposed service defines");
                value
                    .error(what, "the name of one of `exposure.services[].subsets` of its service");
            }
            for exposed in &exposure.services {
                let line = exposed.line.within(&value.place().file);
                if exposed.service.host == name.host {
                    let what =
                        format!("has the name `{name}`, which is the service exposed on {line}");
                    value.error(what, "a name that no service has");
                }
                if exposed.names.iter().any(|other| other.overlaps(name)) {
                    let what = format!("has the name `{name}`, which {line} gives to a service");
                    value.error(what, "each name once, here or in `exposure`");
                }
            }
        }
    }

    /// Warns of links by which the gateway cannot be used.
    fn own_links(&self, root: Value<'_>) {
        let (Some(gateway), Some(Some(links))) = (&self.gateway, &self.links) else {
            return;
        };
        let own = &gateway.cluster;
        let clusters = self.trust.as_ref().and_then(Trust::cluster_names);
        let clusters: Option<&BTreeSet<String>> = clusters.as_ref();
        for (Link { from, to, budget, .. }, value) in links.iter().zip(root.find("links[]")) {
            if to == own && budget.is_some() {
                let what = format!("has a `budget` of tunnels to `{own}`, which is this cluster");
                value.error(what, format!("it in the configuration of `{from}`"));
            }
            if budget.is_some() && from != own && self.counts_as_unlisted(from) {
                self.warn_of_unlisted(value, "has a `budget` that counts no tunnel", from);
            }
            let is_unknown = clusters.is_some_and(|clusters| !clusters.contains(from));
            if to == own && from != to && is_unknown {
                let what = format!("is from `{from}`, which is not a cluster of `trust`");
                value.warning(what, "a cluster that it names");
            }
        }
        if !links.is_empty() && links.iter().all(|link| link.to != *own) {
            let what =
                format!("has no link to `{own}`, so only peers of `{own}` may use this gateway");
            for list in root.find("links") {
                list.warning(&what, format!("`{{from: CLUSTER, to: {own}}}` into it"));
            }
        }
    }

    /// Returns whether peers of a cluster are accepted and counted under another name.
    fn counts_as_unlisted(&self, cluster: &str) -> bool {
        self.trust.as_ref().is_some_and(|trust| {
            let mut domains = trust.domains.iter();
            let is_listed = domains.any(|domain| domain.cluster == cluster);
            trust.skip_validation && trust.clusters.is_empty() && !is_listed
        })
    }

    /// Reports policies that are expected of a control plane of Envoy's.
    fn policies(&self, root: Value<'_>) {
        let is_off = self.policy.is_none_or(|policy| policy.istio == Enforcement::Off);
        let source = match self.discovery {
            Some(Discovery::Envoy(_)) => "an Envoy control plane does not send",
            Some(Discovery::Kubernetes(_)) => "are not read from Kubernetes",
            _ => return,
        };
        if is_off {
            return;
        }
        for value in root.find("policy.istio") {
            let what = format!("requires Istio's policies, which {source}");
            value.error(what, "`off`, and the permitted peers into `exposure`");
        }
    }

    /// Rejects keys about objects where there are none, and a second API server. A mesh file would
    /// be served before the objects that restrict it are known.
    fn objects(&self, root: Value<'_>) {
        let Some(exposure) = &self.exposure else { return };
        let is_live = matches!(self.discovery, Some(Discovery::Kubernetes(_)) | None);
        let is_own = matches!(self.discovery, Some(Discovery::File(_) | Discovery::Kubernetes(_)));
        for value in root.find("exposure.kubernetes").into_iter().filter(|_| is_own) {
            let what = "is for `discovery.kind: istio` and `envoy`";
            value.error(what, "`discovery: {kind: kubernetes}` alone");
        }
        let cache = exposure.kubernetes.as_ref().and_then(|api| api.cache.as_ref());
        let xds = self.discovery.as_ref().and_then(Discovery::xds);
        for value in root.find("exposure.kubernetes.cache") {
            if cache.is_some() && cache == xds.and_then(|xds| xds.cache.as_ref()) {
                value.error("is the file of `discovery.cache` as well", "another file");
            }
        }
        if is_live || exposure.kubernetes.is_some() || !exposure.files.is_empty() {
            return;
        }
        let how = if is_own {
            "`files: [DIRECTORY]` beside it"
        } else {
            "`files: [DIRECTORY]` or `kubernetes: {}` beside it"
        };
        for value in root.find("exposure") {
            if !exposure.auto.is_empty() {
                let what = "selects Services of `exposure.files`, and there are none";
                value.at("exposure", "auto").error(what, how);
            }
            if exposure.bindings.is_some() {
                let what = "is for objects of `exposure.files`, and there are none";
                value.at("exposure", "bindings").error(what, how);
            }
        }
    }

    /// Warns of labels of subsets that istiod does not send.
    fn labels(&self, root: Value<'_>) {
        if !matches!(self.discovery, Some(Discovery::Istio(_))) {
            return;
        }
        for labels in root.find("exposure.services[].subsets[].labels") {
            for (entry, value) in labels.pairs() {
                let key = &*entry.key;
                if !KNOWN_LABELS.contains(&key) {
                    let what = format!("is of the label `{key}`, which istiod does not send");
                    let known = KNOWN_LABELS.map(|known| format!("`{known}`"));
                    value.warning(what, format!("one of {}", known.join(", ")));
                }
            }
        }
    }

    /// Warns of PROXY headers that no endpoint gets.
    fn proxy_headers(&self, root: Value<'_>) {
        let lists = (&self.listeners, &self.traffic);
        let (Some(listeners), Some(traffic)) = lists else { return };
        if listeners.iter().any(Listener::is_tls) {
            return;
        }
        for (entry, value) in traffic.iter().zip(root.find("traffic[]")) {
            if entry.proxy_protocol == Some(ProxyProtocol::V2) {
                let what = "applies to tunnels of TLS listeners, and there is none";
                let how = "a listener with `protocol: tls`, or remove it";
                value.at("traffic[]", "proxy_protocol").warning(what, how);
            }
        }
    }

    /// Warns of preferences that need a locality of the gateway, where none is known before the
    /// start: istiod's record of the pod may name one.
    fn localities(&self, root: Value<'_>) {
        let is_later = matches!(self.discovery, Some(Discovery::Istio(_)));
        let (Some(gateway), Some(traffic), false) = (&self.gateway, &self.traffic, is_later) else {
            return;
        };
        let (region, zone) = (&gateway.locality.region, &gateway.locality.zone);
        for (entry, value) in traffic.iter().zip(root.find("traffic[]")) {
            let lacks = match entry.distribution {
                Some(Distribution::Close) => region.is_empty() || zone.is_empty(),
                Some(Distribution::Region) => region.is_empty(),
                Some(Distribution::Network | Distribution::Any) | None => false,
            };
            if lacks {
                let what = "needs the gateway's locality, and `gateway.locality` is not set";
                let how = "`gateway: {locality: {region: REGION, zone: ZONE}}`";
                value.at("traffic[]", "distribution").warning(what, how);
            }
        }
    }
}

/// Returns the clusters of all bindings.
fn bound_clusters(root: Value<'_>) -> impl Iterator<Item = Value<'_>> {
    let lists = root.find("bindings[].cluster[]");
    root.find("bindings[].cluster").into_iter().chain(lists)
}

/// Warns of variables such as `${CLUSTER}`, which nothing expands. Findings name the variable
/// alone, because the text around it may be secret.
fn unexpanded(node: &Node, report: &Report) {
    match &node.kind {
        Kind::Text(text) => {
            if let Some(name) = variable(text) {
                let what = format!("`${{{name}}}` is not a variable here but text");
                report.warning(node.position, what, "its value");
            }
        }
        Kind::List(nodes) => nodes.iter().for_each(|node| unexpanded(node, report)),
        Kind::Map(entries) => entries.iter().for_each(|entry| unexpanded(&entry.value, report)),
        Kind::Null | Kind::Bool(_) | Kind::Int(_) | Kind::Float => {}
    }
}

/// Returns the name of the first variable of a shell in a text: `${NAME}`, or `${NAME` with an
/// operator such as `:-`.
fn variable(text: &str) -> Option<&str> {
    let mut rest = text;
    while let Some((_, after)) = rest.split_once("${") {
        let end = after.find(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let (name, operator) = after.split_at_checked(end?)?;
        if !name.is_empty() && operator.starts_with(['}', ':', '-', '=', '?', '+']) {
            return Some(name);
        }
        rest = after;
    }
    None
}

/// Reports clusters with the name of the cluster of all issuers without an entry.
fn reserved_clusters(root: Value<'_>) {
    if root.find("trust.clusters[]").is_empty() {
        return;
    }
    let named = ["gateway.cluster", "trust.clusters[].name", "trust.domains[].cluster"];
    for name in named.into_iter().flat_map(|path| root.find(path)) {
        if name.word() == Some(UNKNOWN_CLUSTER) {
            let what = format!("is `{UNKNOWN_CLUSTER}`, which is the cluster of all other issuers");
            name.error(what, "another name");
        }
    }
}

/// Reports addresses that cannot be bound together, at the later line of the two.
fn overlaps(root: Value<'_>, report: &Report) {
    let address = |value: Value<'_>| Some((value.word()?.parse().ok()?, Some(value.position())));
    let mut all: Vec<(String, SocketAddr, Option<Position>)> = Vec::new();
    for listener in root.find("listeners[]") {
        let name = listener.peek("name").unwrap_or("?");
        let bind = listener.child("listeners[]", "bind").and_then(address);
        all.extend(bind.map(|(bind, line)| (format!("listener `{name}`"), bind, line)));
    }
    for binding in root.find("bindings[]") {
        let service = binding.peek("service").unwrap_or("?");
        let bind = binding.child("bindings[]", "listen").and_then(address);
        all.extend(bind.map(|(bind, line)| (format!("`bindings[]` {service}"), bind, line)));
    }
    for (path, several, default) in [
        ("admin.bind", "admin.bind[]", Some(ADMIN)),
        ("metrics.bind", "metrics.bind[]", Some(METRICS)),
        ("readiness.bind", "readiness.bind[]", Some(READINESS)),
        ("dns.listen", "dns.listen[]", None),
    ] {
        let given = root.find(path).into_iter().chain(root.find(several));
        let mut binds: Vec<_> = given.filter_map(address).collect();
        if binds.is_empty() {
            binds.extend(default.map(|default| (default, None)));
        }
        all.extend(binds.into_iter().map(|(bind, line)| (format!("`{path}`"), bind, line)));
    }
    for (index, (label, address, line)) in all.iter().enumerate() {
        for (earlier_label, earlier, earlier_line) in all.iter().take(index) {
            if !addresses_overlap(*address, *earlier) {
                continue;
            }
            // Two defaults never overlap, so one of the lines is known.
            let line = (*line).max(*earlier_line).unwrap_or(Position::Line(1));
            let what = format!("{label} ({address}) overlaps {earlier_label} ({earlier})");
            report.error(line, what, "another port or a specific address");
        }
    }
}

/// Returns whether the kernel would refuse the second of two binds. `[::]` also takes IPv4; port 0
/// is any free port.
pub(super) fn addresses_overlap(one: SocketAddr, other: SocketAddr) -> bool {
    let (a, b) = (one.ip().to_canonical(), other.ip().to_canonical());
    let covers =
        |wide: IpAddr, ip: IpAddr| wide.is_unspecified() && (wide.is_ipv6() || ip.is_ipv4());
    let same_port = one.port() == other.port() && one.port() != 0;
    same_port && (a == b || covers(a, b) || covers(b, a))
}

/// The admin pages stop the process and show its state, without a password.
fn admin_is_local(root: Value<'_>) {
    for value in root.find("admin.bind") {
        let address = value.word().and_then(|text| text.parse::<SocketAddr>().ok());
        let is_remote = |address: &SocketAddr| !address.ip().to_canonical().is_loopback();
        if let Some(address) = address.filter(is_remote) {
            let what = format!("is `{address}`, where other hosts could stop this gateway");
            value.error(what, format!("`\"127.0.0.1:{}\"`", address.port()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::instead;

    #[test]
    fn wildcards_overlap_what_they_cover_and_port_zero_nothing() {
        let overlap = |a: &str, b: &str| addresses_overlap(a.parse().unwrap(), b.parse().unwrap());
        assert!(overlap("127.0.0.1:1", "127.0.0.1:1"));
        assert!(overlap("0.0.0.0:1", "127.0.0.1:1") && overlap("127.0.0.1:1", "0.0.0.0:1"));
        assert!(overlap("[::]:1", "127.0.0.1:1") && overlap("[::]:1", "0.0.0.0:1"));
        assert!(overlap("[::]:1", "[::1]:1") && overlap("[::ffff:127.0.0.1]:1", "127.0.0.1:1"));
        assert!(!overlap("0.0.0.0:1", "[::1]:1"));
        assert!(!overlap("127.0.0.1:1", "127.0.0.2:1"));
        assert!(!overlap("127.0.0.1:1", "127.0.0.1:2"));
        assert!(!overlap("127.0.0.1:0", "127.0.0.1:0"));
    }

    #[test]
    fn variables_that_nothing_expands_are_a_warning_without_the_text_around_them() {
        for (text, name) in [
            ("${LEVEL}", Some("LEVEL")),
            ("a-${B_2:-info}", Some("B_2")),
            ("${} ${x}", Some("x")),
            ("secret${TOKEN}secret", Some("TOKEN")),
            ("$LEVEL", None),
            ("${", None),
            ("${a b}", None),
            ("info", None),
        ] {
            assert_eq!(variable(text), name, "{text}");
        }
        let found = instead("gateway: {", "gateway: {network: 'net-${ZONE}', ");
        let want = "1: warning: `${ZONE}` is not a variable here but text; write its value";
        assert_eq!(found, want);
    }
}
