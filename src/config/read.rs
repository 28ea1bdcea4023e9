//! From the tree to a [`Config`], section by section in the order of the example file.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::time::Duration;

use super::aliases;
use super::checks::{self, Opened};
use super::exposure;
use super::links;
use super::listeners::{self, network, socket_address};
use super::sources;
use super::traffic;
use super::trust;
use super::{
    ADMIN, Access, Config, DRAIN_DEADLINE, DRAIN_LAG, Dial, Directives, Discovery, Drain, Examined,
    Exposure, Gateway, Limits, Link, Listener, Locality, LocalityOrigin, Log, LogFormat, METRICS,
    Names, Policy, PolicyMode, READINESS, Trust,
};
use crate::yaml::{Document, Fields, Report, Value};
use bytesize::ByteSize;

/// More threads than any machine that we know of has cores.
const WORKERS_MAX: u16 = 1024;

/// Less is a mistyped unit: it would not hold what one busy connection does.
const BUFFERS_MIN: usize = 1 << 20;

/// A longer drain is a mistyped unit: Kubernetes has killed the process long before.
const DRAIN_MAX: Duration = Duration::from_secs(60 * 60);

/// Keys that the design names and that later work brings.
const LATER: &[&str] = &["networks", "tracing"];

/// Reads the whole document. There is a configuration exactly when no finding is an error, but for
/// files of certificates, keys and tokens that do not exist.
pub(super) fn config(document: &Document) -> Examined {
    let report = Report::of(document);
    let mut examined = Examined::default();
    let example = "gateway: {cluster: east}";
    let config = Fields::of_document(document, &report, example)
        .and_then(|top| sections(document, &report, top, &mut examined));
    examined.named = report.named();
    examined.absent = report.absent();
    examined.findings = report.into_findings();
    examined.config = config.filter(|_| !examined.findings.has_errors_beside_absent());
    examined
}

/// Every section is read before the first `?`, so that each one has reported its findings.
/// Those that name other files are noted in `examined`, whatever is wrong with the rest.
fn sections(
    document: &Document,
    report: &Report,
    mut top: Fields<'_>,
    examined: &mut Examined,
) -> Option<Config> {
    top.later(LATER);
    let own = top.need("gateway", "{cluster: east}");
    let identity = top.need("identity", sources::IDENTITY_EXAMPLE);
    let identity = identity.and_then(sources::identity);
    let trust = top.need("trust", "{domains: [{name: east.local}]}");
    examined.trust_place = trust.map(Value::place);
    let trust = trust.and_then(trust::read);
    let gateway = own.and_then(|own| gateway(own, trust.as_ref()));
    let example = "[{name: cross-network, bind: \"[::]:15008\"}]";
    let listeners = top
        .need("listeners", example)
        .map(listeners::read)
        .unwrap_or_default();
    let discovery = top
        .need("discovery", "{kind: file, path: mesh.yaml}")
        .and_then(sources::discovery);
    let clusters = trust.as_ref().and_then(Trust::cluster_names);
    let own = gateway.as_ref().map(|own| own.cluster.as_str());
    let (exposure, names, links) = services(&mut top, clusters.as_ref(), own);
    let policy = section(&mut top, "policy", |value| {
        policy(value, discovery.as_ref())
    });
    let locality = own_locality(gateway.as_ref(), discovery.as_ref());
    let traffic = section(&mut top, "traffic", |value| traffic::read(value, locality));
    let dns = section(&mut top, "dns", sources::dns);
    let dial = section(&mut top, "dial", dial);
    let limits = section(&mut top, "limits", limits);
    let workers = top
        .get("workers")
        .map_or(Some(0), |value| value.number(0, WORKERS_MAX));
    let (admin, metrics, readiness) = binds(report, &mut top, &listeners);
    let drain = section(&mut top, "drain", drain);
    let log = section(&mut top, "log", log);
    top.finish();
    examined.identity.clone_from(&identity);
    examined.trust.clone_from(&trust);
    examined.discovery.clone_from(&discovery);
    examined.objects = exposure.iter().flat_map(|one| one.files.clone()).collect();
    Some(Config {
        file: document.file.clone(),
        gateway: gateway?,
        identity: identity?,
        trust: trust?,
        listeners: listeners
            .into_iter()
            .map(|(listener, _)| listener)
            .collect(),
        discovery: discovery?,
        exposure: exposure?,
        links: links?,
        names: names?,
        policy: policy?,
        traffic: traffic?,
        dns: dns?,
        dial: dial?,
        limits: limits?,
        workers: workers?.into(),
        admin: admin.to_bind(),
        metrics: checks::to_binds(&metrics),
        readiness: readiness.to_bind(),
        drain: drain?,
        log: log?,
    })
}

/// What is said of services and of who may ask for them: exposure, names and links.
fn services(
    top: &mut Fields<'_>,
    clusters: Option<&BTreeSet<String>>,
    own: Option<&str>,
) -> (Option<Exposure>, Option<Names>, Option<Option<Vec<Link>>>) {
    let exposure = section(top, "exposure", |value| exposure::read(value, clusters));
    let names = section(top, "names", |value| {
        aliases::read(value, clusters, exposure.as_ref())
    });
    let links = section(top, "links", |value| {
        links::read(value, clusters, own).map(Some)
    });
    (exposure, names, links)
}

/// A section that may be left out.
fn section<'a, T: Default>(
    top: &mut Fields<'a>,
    key: &'static str,
    read: impl Fn(Value<'a>) -> Option<T>,
) -> Option<T> {
    top.get(key).map_or_else(|| Some(T::default()), read)
}

fn gateway(value: Value<'_>, trust: Option<&Trust>) -> Option<Gateway> {
    let mut fields = value.fields("gateway")?;
    let has_issuers = trust.is_some_and(|trust| !trust.clusters.is_empty());
    let cluster = fields.need("cluster", "east");
    let cluster = cluster.and_then(|name| trust::cluster_name(name, has_issuers));
    let network = match fields.get("network") {
        Some(network) => network.text(),
        None => cluster,
    };
    let given = fields.get("locality");
    let locality = given.map_or_else(|| Some(Locality::default()), locality);
    fields.finish();
    Some(Gateway {
        cluster: cluster?.to_owned(),
        network: network?.to_owned(),
        locality_origin: origin(given, locality.as_ref()?),
        locality: locality?,
    })
}

/// Returns the locality of the gateway as far as it is known before the start: istiod's record of
/// the pod may name another one.
fn own_locality<'a>(
    gateway: Option<&'a Gateway>,
    discovery: Option<&Discovery>,
) -> Option<&'a Locality> {
    let is_told = matches!(discovery, Some(Discovery::Istio { .. }));
    let gateway = gateway.filter(|_| !is_told);
    gateway.map(|gateway| &gateway.locality)
}

/// Returns the source of a locality. Values without a line are the pod's.
fn origin(given: Option<Value<'_>>, locality: &Locality) -> LocalityOrigin {
    let place = given.map(Value::place);
    match place.filter(|_| *locality != Locality::default()) {
        None => LocalityOrigin::Unknown,
        Some(place) if place.line == 0 => LocalityOrigin::Pod(place.to_string()),
        Some(_) => LocalityOrigin::Configuration,
    }
}

fn locality(value: Value<'_>) -> Option<Locality> {
    let mut fields = value.fields("gateway.locality")?;
    let mut part = |key| {
        fields
            .get(key)
            .map_or(Some(""), Value::text)
            .map(str::to_owned)
    };
    let (region, zone, subzone) = (part("region"), part("zone"), part("subzone"));
    fields.finish();
    Some(Locality {
        region: region?,
        zone: zone?,
        subzone: subzone?,
    })
}

/// Reads what is done about policies. Nobody may think that they hold where none are told.
fn policy(value: Value<'_>, discovery: Option<&Discovery>) -> Option<Policy> {
    let mut fields = value.fields("policy")?;
    fields.later(&["files"]);
    let modes = [
        ("off", PolicyMode::Off),
        ("audit", PolicyMode::Audit),
        ("enforce", PolicyMode::Enforce),
    ];
    let said = fields.get("istio");
    let istio = said.map_or(Some(PolicyMode::Off), |mode| mode.choice(&modes));
    fields.finish();
    let policy = Policy { istio: istio? };
    if let (Some(said), Some(Discovery::Envoy { .. })) = (said, discovery)
        && policy.istio != PolicyMode::Off
    {
        let what = "asks for Istio's policies, which a control plane of Envoy's does not tell";
        said.error(what, "`off`, and in `exposure` who may reach what");
    }
    Some(policy)
}

fn dial(value: Value<'_>) -> Option<Dial> {
    let mut fields = value.fields("dial")?;
    fields.later(&["try", "budget"]);
    let allow: Option<Vec<_>> = match fields.get("allow") {
        Some(list) => list
            .items()
            .map(network)
            .collect::<Vec<_>>()
            .into_iter()
            .collect(),
        None => Some(Vec::new()),
    };
    fields.finish();
    Some(Dial { allow: allow? })
}

fn limits(value: Value<'_>) -> Option<Limits> {
    let mut fields = value.fields("limits")?;
    let buffers = match fields.get("buffers") {
        Some(value) => size(value).map(Some),
        None => Some(None),
    };
    fields.finish();
    Some(Limits { buffers: buffers? })
}

fn size(value: Value<'_>) -> Option<usize> {
    let wanted = "a size of at least 1MiB, such as `256MiB` or `1.5GiB`";
    value.parsed(wanted, |text| {
        let bytes: ByteSize = text.parse().ok()?;
        let bytes = usize::try_from(bytes.as_u64()).ok()?;
        (bytes >= BUFFERS_MIN).then_some(bytes)
    })
}

/// The addresses of `admin`, `metrics` and `readiness`.
fn binds<'a>(
    report: &Report,
    top: &mut Fields<'a>,
    listeners: &[(Listener, u64)],
) -> (Opened<'a>, Vec<Opened<'a>>, Opened<'a>) {
    let admin = bind(top, "admin", ADMIN);
    let metrics = opened(top, "metrics", METRICS, |bind| match bind.is_list() {
        true => bind.items().collect(),
        false => vec![bind],
    });
    let readiness = bind(top, "readiness", READINESS);
    let all = [&admin].into_iter().chain(&metrics).chain([&readiness]);
    checks::overlaps(report, listeners, all);
    checks::admin_is_local(&admin);
    (admin, metrics, readiness)
}

fn bind<'a>(top: &mut Fields<'a>, key: &'static str, default: SocketAddr) -> Opened<'a> {
    let mut one = opened(top, key, default, |bind| vec![bind]);
    one.swap_remove(0)
}

/// Reads `bind` of a section, whose values `split` gives. Returns the default if there is none, or
/// none that can be read.
fn opened<'a>(
    top: &mut Fields<'a>,
    label: &'static str,
    default: SocketAddr,
    split: impl Fn(Value<'a>) -> Vec<Value<'a>>,
) -> Vec<Opened<'a>> {
    let example = format!("{{bind: \"{default}\"}}");
    let section = top.get(label).and_then(|value| value.fields(label));
    let mut all = Vec::new();
    if let Some(mut fields) = section {
        let bind = fields.need("bind", &example);
        if let Some(empty) = bind.filter(|bind| bind.is_vacant()) {
            empty.error("is empty", format!("`\"{default}\"`"));
        }
        let given = bind.map(split).unwrap_or_default();
        let read = given.into_iter().filter_map(|value| {
            Some(Opened {
                label,
                address: socket_address(value)?,
                given: Some(value),
            })
        });
        all.extend(read);
        fields.finish();
    }
    if all.is_empty() {
        all.push(Opened {
            label,
            address: default,
            given: None,
        });
    }
    all
}

fn drain(value: Value<'_>) -> Option<Drain> {
    let mut fields = value.fields("drain")?;
    let mut time = |key, default| fields.get(key).map_or(Some(default), duration);
    let (lag, deadline) = (time("lag", DRAIN_LAG), time("deadline", DRAIN_DEADLINE));
    fields.finish();
    Some(Drain {
        lag: lag?,
        deadline: deadline?,
    })
}

fn duration(value: Value<'_>) -> Option<Duration> {
    let wanted = "a duration of at most 1h, such as `5s` or `1m 30s`";
    let parse = |text: &str| humantime::parse_duration(text).ok();
    value.parsed(wanted, |text| {
        parse(text).filter(|duration| *duration <= DRAIN_MAX)
    })
}

fn log(value: Value<'_>) -> Option<Log> {
    let mut fields = value.fields("log")?;
    let default = Log::default();
    let level = fields.get("level").map_or(Some(default.level), log_level);
    let modes = [
        ("all", Access::All),
        ("sampled", Access::Sampled),
        ("errors", Access::Errors),
        ("off", Access::Off),
    ];
    let access = fields
        .get("access")
        .map_or(Some(default.access), |access| access.choice(&modes));
    let formats = [("text", LogFormat::Text), ("json", LogFormat::Json)];
    let format = fields
        .get("format")
        .map_or(Some(default.format), |format| format.choice(&formats));
    fields.finish();
    Some(Log {
        level: level?,
        access: access?,
        format: format?,
    })
}

fn log_level(value: Value<'_>) -> Option<String> {
    let wanted = "a level (`off`, `error`, `warn`, `info`, `debug`, `trace`) or a list such as \
                  `info,strait::datapath=debug`";
    let read = value.parsed(wanted, |text| Directives::parse(text).ok())?;
    if !read.has_default {
        let what = format!("is `{}`, which silences everything else", read.text);
        value.error(what, format!("`info,{}`", read.text));
        return None;
    }
    Some(read.text)
}
