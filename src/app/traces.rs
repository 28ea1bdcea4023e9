//! Export of spans to an OTLP collector by gRPC, as the `OTEL_*` variables of the environment say.
//!
//! `opentelemetry-otlp` reads most of them and ignores wrong values. Here they are an error.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{anyhow, bail};
use opentelemetry::KeyValue;
use opentelemetry_otlp::{SpanExporter, WithTonicConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::resource::EnvResourceDetector;
use opentelemetry_sdk::trace::{Sampler, SpanExporter as _};
use tokio::task::spawn_blocking;
use tracing::info;

use crate::config::{ControlPlane, HostPort, Roots};
use crate::grpc::channel;
use crate::telemetry::{Metrics, Sampling};

/// Variables with a number above 0.
const NUMBERS: [&str; 5] =
    [QUEUE, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "OTEL_BSP_SCHEDULE_DELAY", TIMEOUTS[0], TIMEOUTS[1]];
/// Deadline of a message in milliseconds. Of two variables for one setting, the first one wins.
const TIMEOUTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT"];
/// Default of OpenTelemetry for that.
const TIMEOUT_DEFAULT: u64 = 10_000;
/// File with the roots by which the collector is verified.
const ROOTS: [&str; 2] =
    ["OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE"];
/// Certificate of the client, which is not supported.
const CLIENT: [&str; 2] =
    ["OTEL_EXPORTER_OTLP_TRACES_CLIENT_CERTIFICATE", "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"];
/// Port of an `https` URL without one.
const HTTPS: u16 = 443;
/// Variables with a list of pairs. Their values may be secret.
const PAIRS: [&str; 3] =
    ["OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_RESOURCE_ATTRIBUTES"];
const QUEUE: &str = "OTEL_BSP_MAX_QUEUE_SIZE";
/// Default of OpenTelemetry for the limit of queued spans.
const QUEUE_DEFAULT: usize = 2048;
/// Limit of the queue: at about 2 KiB each, its spans hold 128 MiB.
const QUEUE_MAX: usize = 65_536;
/// Time at the end of the process in which the collector has to take the queued spans.
const FLUSH_DEADLINE: Duration = Duration::from_secs(2);

/// Returns the value of a variable, if it is set and not empty.
type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Begins to trace tunnels if the environment names a collector.
///
/// # Errors
/// The variable whose value is wrong or not supported.
pub(super) fn start(metrics: &Metrics) -> anyhow::Result<()> {
    let variables = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let Some(settings) = read(&variables)? else {
        return Ok(());
    };
    let Settings { collector, tls, sampling, queue } = settings;
    let mut exporter = SpanExporter::builder().with_tonic();
    if let Some(server) = tls {
        let deadline = first(&variables, TIMEOUTS).and_then(|(_, text)| text.parse().ok());
        let deadline = Duration::from_millis(deadline.unwrap_or(TIMEOUT_DEFAULT));
        exporter = exporter.with_channel(channel::connect_lazily(server, deadline)?);
    }
    let mut exporter = exporter.build()?;
    exporter.set_resource(&resource(&variables));
    info!(collector, ?sampling, "traces are exported");
    metrics.trace(sampling, exporter, queue);
    Ok(())
}

/// Exports the queued spans at the end of the process, within a deadline.
pub(super) async fn flush(metrics: &Arc<Metrics>) {
    if metrics.tracer().is_some() {
        let metrics = Arc::clone(metrics);
        let flush = move || metrics.tracer().map(|tracer| tracer.shut_down(FLUSH_DEADLINE));
        let _ = spawn_blocking(flush).await;
    }
}

/// Settings besides those that the library reads.
#[derive(Debug)]
struct Settings {
    collector: String,
    /// Collector of an `https` URL, with its roots.
    tls: Option<ControlPlane>,
    sampling: Sampling,
    queue: usize,
}

/// Returns the first of two variables that is set, with its value.
fn first(variables: Variables<'_>, names: [&'static str; 2]) -> Option<(&'static str, String)> {
    names.into_iter().find_map(|name| Some((name, variables(name)?)))
}

/// Checks the environment. Returns none if it names no collector, or turns traces off.
fn read(variables: Variables<'_>) -> anyhow::Result<Option<Settings>> {
    let first = |names| first(variables, names);
    let endpoint = first(["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"]);
    let exporter = variables("OTEL_TRACES_EXPORTER").unwrap_or_else(|| "otlp".to_owned());
    let is_disabled = variables("OTEL_SDK_DISABLED").is_some_and(|it| it == "true");
    let Some((name, collector)) = endpoint.filter(|_| exporter != "none" && !is_disabled) else {
        return Ok(None);
    };
    if exporter != "otlp" {
        bail!("`OTEL_TRACES_EXPORTER` cannot be `{exporter}`; write `otlp` or `none`");
    }
    let tls = collector.strip_prefix("https://").map(server);
    if matches!(tls, Some(None)) || (tls.is_none() && !collector.starts_with("http://")) {
        bail!("`{name}` cannot be `{collector}`; write `http://HOST:PORT` or `https://HOST:PORT`");
    }
    let tls = tls.flatten().map(|server| with_roots(variables, server)).transpose()?;
    let protocol = first(["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"]);
    if let Some((name, protocol)) = protocol.filter(|(_, protocol)| protocol != "grpc") {
        bail!("`{name}` cannot be `{protocol}`; write `grpc`");
    }
    for name in NUMBERS {
        if let Some(text) = variables(name) {
            let number = text.parse::<NonZeroU32>();
            number.map_err(|error| anyhow!("`{name}` cannot be `{text}`: {error}"))?;
        }
    }
    for name in PAIRS {
        let text = variables(name);
        if text.is_some_and(|text| text.split(',').any(|pair| !pair.contains('='))) {
            bail!("`{name}` is malformed; write `NAME=VALUE,NAME=VALUE`");
        }
    }
    let queue = variables(QUEUE).and_then(|text| text.parse().ok());
    let queue = queue.unwrap_or(QUEUE_DEFAULT).min(QUEUE_MAX);
    Ok(Some(Settings { collector, tls, sampling: sampling(variables)?, queue }))
}

/// Returns the server in an `https` URL, which is given without its scheme.
fn server(rest: &str) -> Option<ControlPlane> {
    let (authority, _) = rest.split_once('/').unwrap_or((rest, ""));
    let mut address = HostPort::parse(authority).ok()?;
    address.port.get_or_insert(HTTPS);
    let (token, san, headers) = (None, None, Vec::new());
    Some(ControlPlane { address, roots: Roots::System, token, san, headers })
}

/// Returns a server with the roots that the environment names, which have to be usable.
fn with_roots(variables: Variables<'_>, server: ControlPlane) -> anyhow::Result<ControlPlane> {
    if let Some((name, _)) = first(variables, CLIENT) {
        bail!("`{name}` is not supported; the collector has to accept clients without one");
    }
    let Some((name, file)) = first(variables, ROOTS) else { return Ok(server) };
    let server = ControlPlane { roots: Roots::File(file.into()), ..server };
    match channel::check_files(&server).pop() {
        Some((_, error)) => bail!("`{name}` cannot be used: {error}"),
        None => Ok(server),
    }
}

/// Reads the rule of sampling. Without a ratio, `traceidratio` samples all.
fn sampling(variables: Variables<'_>) -> anyhow::Result<Sampling> {
    let name = variables("OTEL_TRACES_SAMPLER");
    let name = name.unwrap_or_else(|| "parentbased_always_on".to_owned());
    let root = name.strip_prefix("parentbased_");
    let is_parent_based = root.is_some();
    let root = match root.unwrap_or(&name) {
        "always_on" => Sampler::AlwaysOn,
        "always_off" => Sampler::AlwaysOff,
        "traceidratio" => {
            let text = variables("OTEL_TRACES_SAMPLER_ARG").unwrap_or_else(|| "1".to_owned());
            let ratio = text.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio));
            Sampler::TraceIdRatioBased(ratio.ok_or_else(|| {
                anyhow!("`OTEL_TRACES_SAMPLER_ARG` cannot be `{text}`; write a ratio from 0 to 1")
            })?)
        }
        _ => bail!(
            "`OTEL_TRACES_SAMPLER` cannot be `{name}`; write `always_on`, `always_off` or \
             `traceidratio`, with or without `parentbased_` before it"
        ),
    };
    Ok(Sampling { root, is_parent_based })
}

fn resource(variables: Variables<'_>) -> Resource {
    let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    let resource = Resource::builder_empty().with_service_name("strait").with_attribute(version);
    let resource = resource.with_detector(Box::new(EnvResourceDetector::new()));
    match variables("OTEL_SERVICE_NAME") {
        Some(name) => resource.with_service_name(name).build(),
        None => resource.build(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ENDPOINT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317");

    fn read(variables: &[(&str, &str)]) -> Result<Option<Settings>, String> {
        let value = |name: &str| {
            let found = variables.iter().find(|(other, _)| *other == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        super::read(&value).map_err(|error| error.to_string())
    }

    #[test]
    fn traces_are_off_unless_a_collector_is_named() {
        for off in [
            &[][..],
            &[("OTEL_SERVICE_NAME", "east")],
            &[ENDPOINT, ("OTEL_TRACES_EXPORTER", "none")],
            &[ENDPOINT, ("OTEL_SDK_DISABLED", "true")],
        ] {
            assert!(read(off).expect("no mistake").is_none(), "{off:?}");
        }
    }

    #[test]
    fn the_environment_gives_the_sampler_and_the_queue() {
        for (name, argument, sampler) in [
            ("", "", "ParentBased AlwaysOn"),
            ("always_off", "", "AlwaysOff"),
            ("parentbased_always_off", "", "ParentBased AlwaysOff"),
            ("traceidratio", "0.01", "TraceIdRatioBased(0.01)"),
            ("parentbased_traceidratio", "0.5", "ParentBased TraceIdRatioBased(0.5)"),
            ("parentbased_traceidratio", "", "ParentBased TraceIdRatioBased(1.0)"),
        ] {
            let named = [("OTEL_TRACES_SAMPLER", name), ("OTEL_TRACES_SAMPLER_ARG", argument)];
            let named = named.into_iter().filter(|(_, value)| !value.is_empty());
            let variables: Vec<_> =
                [ENDPOINT, (QUEUE, "1000000")].into_iter().chain(named).collect();
            let settings = read(&variables).expect("no mistake").expect("a collector");
            let Sampling { root, is_parent_based } = settings.sampling;
            let parent = if is_parent_based { "ParentBased " } else { "" };
            assert_eq!(format!("{parent}{root:?}"), sampler, "{name} {argument}");
            assert_eq!(settings.queue, QUEUE_MAX);
        }
        let settings = read(&[ENDPOINT]).expect("no mistake").expect("a collector");
        assert_eq!(settings.queue, QUEUE_DEFAULT);
    }

    #[test]
    fn a_collector_by_tls_has_the_roots_of_the_environment_or_of_the_system() {
        let url = |url| ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", url);
        for (text, address) in [
            ("https://collector:4317", "collector:4317"),
            ("https://collector/", "collector:443"),
            ("https://[2001:db8::1]:4317/v1", "[2001:db8::1]:4317"),
        ] {
            let settings = read(&[url(text)]).expect("no mistake").expect("a collector");
            let server = settings.tls.expect("TLS");
            assert_eq!(
                (server.address.to_string().as_str(), server.roots),
                (address, Roots::System)
            );
        }
        let settings = read(&[ENDPOINT]).expect("no mistake").expect("a collector");
        assert!(settings.tls.is_none());
        let file = tempfile::NamedTempFile::new().expect("a file");
        let path = file.path().to_str().expect("a path");
        for name in ROOTS {
            let error = read(&[url("https://collector"), (name, path)]).expect_err("no root");
            assert!(error.contains(name) && error.contains(path), "{error}");
        }
        let root = crate::tools::dev::Authority::new().expect("a root").root_pem();
        std::fs::write(file.path(), root).expect("a file");
        let settings = read(&[url("https://collector"), (ROOTS[1], path)]).expect("no mistake");
        let server = settings.and_then(|settings| settings.tls).expect("TLS");
        assert_eq!(server.roots, Roots::File(path.into()));
        let error = read(&[url("https://collector"), (CLIENT[0], path)]).expect_err("unsupported");
        assert!(error.contains(CLIENT[0]), "{error}");
    }

    #[test]
    fn a_wrong_value_is_an_error_that_names_its_variable() {
        for (name, value) in [
            ("OTEL_TRACES_EXPORTER", "jaeger"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
            ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "grpc://collector:4317"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://:4317"),
            ("OTEL_TRACES_SAMPLER", "sometimes"),
            (QUEUE, "many"),
            ("OTEL_BSP_SCHEDULE_DELAY", "0"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "10s"),
        ] {
            let error = read(&[ENDPOINT, (name, value)]).expect_err("a mistake");
            assert!(error.contains(name) && error.contains(value), "{error}");
        }
        for name in PAIRS {
            let error = read(&[ENDPOINT, (name, "a=1,secret")]).expect_err("a mistake");
            assert!(error.contains(name) && !error.contains("secret"), "{error}");
        }
        for ratio in ["2", "-1", "NaN", "many"] {
            let sampler = ("OTEL_TRACES_SAMPLER", "traceidratio");
            let ratio = read(&[ENDPOINT, sampler, ("OTEL_TRACES_SAMPLER_ARG", ratio)]);
            let error = ratio.expect_err("a mistake");
            assert!(error.contains("OTEL_TRACES_SAMPLER_ARG"), "{error}");
        }
    }
}
