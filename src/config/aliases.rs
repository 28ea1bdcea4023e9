//! The `names` section: families of suffixes, and other names of services.

use std::collections::BTreeSet;

use serde::Serialize;

use super::exposure::{all, host_port, known_cluster};
use super::listeners::Line;
use super::{Exposure, HostPort};
use crate::yaml::Value;

/// Default of `names.suffixes`: Kubernetes' own, that of its multi-cluster services, and those of
/// Istio's multi-cluster meshes.
pub const SUFFIXES: [&str; 4] = [
    "svc.cluster.local",
    "svc.clusterset.local",
    "mesh.internal",
    "global",
];

/// Names of services besides their hostnames.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Names {
    /// Suffixes under which `NAME.NAMESPACE.SUFFIX` is one service, the first one first. Default
    /// [`SUFFIXES`].
    pub suffixes: Vec<String>,
    /// Names that lead to services. Default: none.
    pub aliases: Vec<Alias>,
}

/// A name that leads to services.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Alias {
    /// The name. Without port it is the port of its services, if they say one; else any.
    pub name: HostPort,
    /// The services behind it, at least one. Without port, the one that was asked for.
    pub to: Vec<HostPort>,
    /// The clusters that see the name, as `trust` names them. Default: all do, and peers
    /// without identity too.
    pub consumers: Option<Vec<String>>,
    /// The region in which its endpoints have to be. Default: any.
    pub region: Option<String>,
    /// Where it stands.
    #[serde(skip)]
    pub line: Line,
}

impl Default for Names {
    fn default() -> Self {
        Self {
            suffixes: SUFFIXES.map(str::to_owned).into(),
            aliases: Vec::new(),
        }
    }
}

/// Reads the section. `clusters` are those that `trust` names; none when the trust
/// section could not be read, which must not bring findings here as well.
pub(super) fn read(
    value: Value<'_>,
    clusters: Option<&BTreeSet<String>>,
    exposure: Option<&Exposure>,
) -> Option<Names> {
    let mut fields = value.fields("names")?;
    let suffixes = match fields.get("suffixes") {
        Some(list) => suffixes(list),
        None => Some(Names::default().suffixes),
    };
    let aliases: Vec<_> = match fields.get("aliases") {
        Some(list) => list
            .items()
            .map(|item| Some((alias(item, clusters)?, item)))
            .collect(),
        None => Vec::new(),
    };
    fields.finish();
    let read: Vec<_> = aliases.iter().flatten().collect();
    for (at, (alias, value)) in read.iter().enumerate() {
        let earlier = || read.iter().take(at).map(|(alias, _)| alias);
        is_free(alias, *value, exposure);
        is_no_repetition(alias, *value, earlier());
        leads_to_services(alias, *value, read.iter().map(|(alias, _)| alias));
    }
    let aliases = aliases.into_iter().map(|read| Some(read?.0));
    Some(Names {
        suffixes: suffixes?,
        aliases: aliases.collect::<Option<_>>()?,
    })
}

fn suffixes(list: Value<'_>) -> Option<Vec<String>> {
    let read: Vec<_> = list.items().map(|item| (suffix(item), item)).collect();
    let mut suffixes: Vec<String> = Vec::new();
    for (suffix, item) in &read {
        let Some(suffix) = suffix else { continue };
        if suffixes.contains(suffix) {
            item.error(format!("has `{suffix}` twice"), "each suffix once");
        }
        suffixes.push(suffix.clone());
    }
    (suffixes.len() == read.len()).then_some(suffixes)
}

fn suffix(value: Value<'_>) -> Option<String> {
    let wanted = "what follows NAME.NAMESPACE and a dot, without wildcards, such as \
                  `svc.cluster.local` or `global`";
    value.parsed(wanted, |text| {
        let name = HostPort::parse(text).ok()?;
        (name.port.is_none() && !name.is_address()).then_some(name.host)
    })
}

fn alias(value: Value<'_>, clusters: Option<&BTreeSet<String>>) -> Option<Alias> {
    let mut fields = value.fields("names.aliases[]")?;
    let named = fields.need("name", "\"payments.global\"");
    let name = named.and_then(name);
    let example = "\"payments.uswest2.svc.cluster.local\"";
    let to = fields.need("to", example).and_then(targets);
    let consumers = fields.get("consumers").map(|list| {
        let cluster = |item| known_cluster(item, clusters);
        all(list, "is empty, so no consumer sees the name", cluster)
    });
    let region = fields.get("region").map(Value::text);
    fields.finish();
    let (name, to) = (name?, to?);
    let alias = Alias {
        name: HostPort {
            port: port_of(&name, &to, named?)?,
            ..name
        },
        to,
        consumers: match consumers {
            Some(consumers) => Some(consumers?),
            None => None,
        },
        region: match region {
            Some(region) => Some(region?.to_owned()),
            None => None,
        },
        line: Line(value.line()),
    };
    Some(alias)
}

/// The port to ask for; none is any.
#[expect(clippy::option_option, reason = "the outer none has been reported")]
fn port_of(name: &HostPort, to: &[HostPort], value: Value<'_>) -> Option<Option<u16>> {
    let ports: BTreeSet<_> = to.iter().map(|target| target.port).collect();
    match (name.port, ports.first()) {
        (Some(port), _) => Some(Some(port)),
        (None, Some(only)) if ports.len() == 1 => Some(*only),
        _ => {
            let what = "has no port, and the services behind it have several";
            value.error(what, format!("`\"{name}:PORT\"`"));
            None
        }
    }
}

fn name(value: Value<'_>) -> Option<HostPort> {
    host_port(value).filter(|name| {
        let what = format!("is `{name}`, an address, which is never looked up as a name");
        if name.is_address() {
            value.error(what, "a name, such as `payments.global`");
        }
        !name.is_address()
    })
}

/// One target or a list of them.
fn targets(value: Value<'_>) -> Option<Vec<HostPort>> {
    let targets = match value.is_list() {
        true => all(value, "is empty, so the name leads nowhere", target)?,
        false => vec![target(value)?],
    };
    let twice = |at: usize, target: &HostPort| {
        let earlier = targets.iter().take(at);
        earlier.into_iter().any(|other| other.host == target.host)
    };
    let again = targets.iter().enumerate();
    if let Some((_, target)) = again.into_iter().find(|(at, target)| twice(*at, target)) {
        let what = format!("has {} twice", target.host);
        value.error(what, "each service once");
        return None;
    }
    Some(targets)
}

fn target(value: Value<'_>) -> Option<HostPort> {
    host_port(value).filter(|target| {
        let what = format!("is `{target}`, an address, and services are known by their hostnames");
        if target.is_address() {
            value.error(what, "the hostname of a service");
        }
        !target.is_address()
    })
}

/// Names of `exposure` and exposed services come first, so that an alias of theirs is never used.
fn is_free(alias: &Alias, value: Value<'_>, exposure: Option<&Exposure>) {
    let name = &alias.name;
    for exposed in exposure.into_iter().flat_map(|of| &of.services) {
        let line = exposed.line;
        if exposed.service.host == name.host {
            let what =
                format!("has the name `{name}`, which is the service exposed on line {line}");
            value.error(what, "a name that no service has");
        }
        if exposed.names.iter().any(|other| other.overlaps(name)) {
            let what = format!("has the name `{name}`, which line {line} gives to a service");
            value.error(what, "each name once, here or in `exposure`");
        }
    }
}

/// Of two aliases for one consumer nobody could say which is meant. One for all is what the others
/// see beside those that are for some.
fn is_no_repetition<'a>(
    alias: &Alias,
    value: Value<'_>,
    mut earlier: impl Iterator<Item = &'a Alias>,
) {
    let common = |other: &Alias| match (&alias.consumers, &other.consumers) {
        (Some(mine), Some(theirs)) => mine.iter().find(|one| theirs.contains(one)).cloned(),
        (None, None) => Some("every consumer".to_owned()),
        _ => None,
    };
    let twice = earlier.find_map(|other| {
        let overlaps = other.name.overlaps(&alias.name);
        Some((common(other).filter(|_| overlaps)?, other.line.0))
    });
    if let Some((consumer, line)) = twice {
        let name = &alias.name;
        let what = format!("has the name `{name}` for {consumer}, as line {line} has");
        value.error(what, "each name once for a consumer");
    }
}

/// What an alias leads to is never another alias.
fn leads_to_services<'a>(
    alias: &Alias,
    value: Value<'_>,
    mut others: impl Iterator<Item = &'a Alias>,
) {
    let is_target = |name: &HostPort| alias.to.iter().any(|target| target.host == name.host);
    if let Some(other) = others.find(|other| is_target(&other.name)) {
        let (name, line) = (&other.name.host, other.line.0);
        let what = format!("leads to `{name}`, which is the alias of line {line}");
        value.error(what, "the hostnames of services into `to`");
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{GOOD, check, exposed, with};
    use super::*;

    fn names(section: &str) -> String {
        with(&format!("names: {section}"))
    }

    fn aliases(entries: &str) -> String {
        names(&format!("{{aliases: [{entries}]}}"))
    }

    #[test]
    fn every_key_of_a_name_is_read() {
        let text = "names:\n  suffixes: [GLOBAL., mesh.internal]\n  aliases:\n    \
            - {name: Foo.Global, to: foo.uswest2:80, consumers: [west], region: us-west-2}\n    \
            - {name: \"foo.global:81\", to: [foo.uswest2:80, foo.useast2]}\n    \
            - {name: bar.global, to: bar.app}\n";
        let (config, findings) = check(&format!("{GOOD}{text}"));
        assert_eq!(findings, "");
        let names = config.expect("a configuration").names;
        assert_eq!(names.suffixes, ["global", "mesh.internal"]);
        let said: Vec<_> = names
            .aliases
            .iter()
            .map(|alias| {
                let to: Vec<_> = alias.to.iter().map(ToString::to_string).collect();
                (alias.name.to_string(), to.join(" "), alias.line.0)
            })
            .collect();
        let want = [
            ("foo.global:80", "foo.uswest2:80", 14),
            ("foo.global:81", "foo.uswest2:80 foo.useast2", 15),
            ("bar.global", "bar.app", 16),
        ];
        let want = want.map(|(name, to, line)| (name.to_owned(), to.to_owned(), line));
        assert_eq!(said, want);
        assert_eq!(names.aliases[0].consumers, Some(vec!["west".to_owned()]));
        assert_eq!(names.aliases[0].region.as_deref(), Some("us-west-2"));
        assert_eq!(
            (&names.aliases[1].consumers, &names.aliases[1].region),
            (&None, &None)
        );
    }

    #[test]
    fn what_is_left_out_is_the_families_and_an_empty_list_is_none() {
        let suffixes = |text: &str| {
            let (config, findings) = check(&format!("{GOOD}{text}"));
            assert_eq!(findings, "");
            config.expect("a configuration").names.suffixes
        };
        assert_eq!(suffixes(""), SUFFIXES);
        assert_eq!(suffixes("names: {aliases: []}"), SUFFIXES);
        assert!(suffixes("names: {suffixes: []}").is_empty());
    }

    #[test]
    fn a_suffix_is_a_plain_name() {
        for text in [
            "*.global",
            ".global",
            "\"\"",
            "\"global:80\"",
            "10.0.0.1",
            "a..b",
            "a b",
        ] {
            let findings = names(&format!("{{suffixes: [{text}]}}"));
            assert!(findings.contains("11: error: "), "{text}: {findings}");
        }
        let twice = names("{suffixes: [global, Global.]}");
        assert!(
            twice.contains("has `global` twice; write each suffix once"),
            "{twice}"
        );
    }

    #[test]
    fn an_alias_that_could_mean_two_things_or_nothing_is_an_error() {
        for (entries, want) in [
            ("{to: a.b}", "`names.aliases[]` has no `name`"),
            ("{name: a.global}", "`names.aliases[]` has no `to`"),
            (
                "{name: 10.0.0.1, to: a.b}",
                "an address, which is never looked up as a name",
            ),
            (
                "{name: a.global, to: \"10.0.0.1:80\"}",
                "services are known by their hostnames",
            ),
            (
                "{name: a.global, to: []}",
                "is empty, so the name leads nowhere",
            ),
            (
                "{name: a.global, to: [a.b, \"a.b:80\"]}",
                "has a.b twice; write each service once",
            ),
            (
                "{name: a.global, to: [\"a.b:80\", \"c.d:81\"]}",
                "has no port, and the services behind it have several; write `\"a.global:PORT\"`",
            ),
            (
                "{name: a.global, to: a.b, consumers: []}",
                "so no consumer sees the name",
            ),
            (
                "{name: a.global, to: a.b, consumers: [south]}",
                "and `trust` names no such cluster",
            ),
            ("{name: a.global, to: a.b, zone: x}", "unknown key `zone`"),
            (
                "{name: a.global, to: a.b}, {name: \"a.global:80\", to: c.d}",
                "has the name `a.global:80` for every consumer, as line 11 has",
            ),
            (
                "{name: a.global, to: a.b, consumers: [east, west]}, \
                 {name: a.global, to: c.d, consumers: [west]}",
                "has the name `a.global` for west, as line 11 has",
            ),
            (
                "{name: a.global, to: b.global}, {name: b.global, to: c.d}",
                "leads to `b.global`, which is the alias of line 11",
            ),
            (
                "{name: a.global, to: a.global}",
                "leads to `a.global`, which is the alias",
            ),
        ] {
            let findings = aliases(entries);
            assert!(findings.contains(want), "{entries}: {findings}");
            assert_eq!(findings.lines().count(), 1, "{findings}");
        }
        for entries in [
            "{name: a.global, to: a.b}, {name: a.global, to: c.d, consumers: [west]}",
            "{name: \"a.global:80\", to: a.b}, {name: \"a.global:81\", to: a.b}",
            "{name: a.global, to: [\"a.b:80\", \"c.d:80\"]}",
        ] {
            assert_eq!(aliases(entries), "", "{entries}");
        }
    }

    #[test]
    fn a_name_that_exposure_gives_or_exposes_is_no_alias() {
        let with_alias = |name: &str| {
            let entry = "{service: echo.app, to: [{cluster: west}], names: [\"echo.global:80\"]}";
            let text = format!(
                "exposure: {{services: [{entry}]}}\nnames: {{aliases: [{{name: \"{name}\", to: \
                 other.app}}]}}\n"
            );
            with(&text)
        };
        assert_eq!(with_alias("other.global"), "");
        assert_eq!(with_alias("echo.global:81"), "");
        let given = with_alias("echo.global");
        assert!(
            given.contains("12: error: `names.aliases[]` has the name"),
            "{given}"
        );
        assert!(
            given.contains("which line 11 gives to a service"),
            "{given}"
        );
        let own = with_alias("echo.app");
        assert!(
            own.contains("which is the service exposed on line 11"),
            "{own}"
        );
    }

    #[test]
    fn workloads_of_an_entry_are_open_or_not() {
        let entry = |value: &str| {
            exposed(&format!(
                "{{service: a.b, to: [{{cluster: west}}], workloads: {value}}}"
            ))
        };
        assert_eq!(entry("true"), "");
        assert!(
            entry("some").contains("workloads` is `some`"),
            "{}",
            entry("some")
        );
    }
}
